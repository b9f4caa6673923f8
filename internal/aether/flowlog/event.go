package flowlog

import (
	"net/netip"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
)

// Kind says what an event tells of.
type Kind = sandseav1.NetworkEventKind

// The kinds.
const (
	DNS        = sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_DNS        // a question to the resolver
	Connection = sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_CONNECTION // at its end, or its refusal
	Artefact   = sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_ARTEFACT   // of a package service
	Policy     = sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_POLICY     // another one came in force
)

// Event is one thing that happened. Strings that a sandbox chose need not be UTF-8; of more than 512 bytes the rest is
// cut.
type Event struct {
	At     time.Time // zero: now. Of something that took time, its end
	Phase  string
	Kind   Kind
	Denied bool
	Rule   string // that decided
	// Service is a package service, or empty.
	Service string
	Name    string // host name, or name of the package
	Version string // of the package
	// Address on the far side, once known, and Port that was asked for.
	Address netip.Addr
	Port    uint16
	// Protocol is dns, tcp, udp, tls, http, connect, socks5, or of an artefact: list, metadata, file.
	Protocol       string
	Sent, Received int64 // bytes
	Duration       time.Duration
	// Source is cache or upstream, or the response code of a DNS answer.
	Source string
	Digest string // SHA-256 of an artefact, in hexadecimal
	// Count is how many equal events this is; 0 means 1.
	Count int64
	Error string // how it ended, if not well
}

// key is what equal events have in common.
type key struct {
	phase    string
	kind     Kind
	denied   bool
	rule     string
	service  string
	name     string
	version  string
	address  netip.Addr
	port     uint16
	protocol string
	source   string
	digest   string
	err      string
}

func (e *Event) key() key {
	return key{
		e.Phase, e.Kind, e.Denied, e.Rule, e.Service, e.Name, e.Version, e.Address, e.Port, e.Protocol, e.Source, e.Digest,
		e.Error,
	}
}

// add folds an equal event into e: numbers add up, and the longest of the durations stays.
func (e *Event) add(other *Event) {
	if e.Count == 0 {
		*e = *other
		return
	}
	e.Sent += other.Sent
	e.Received += other.Received
	e.Duration = max(e.Duration, other.Duration)
	e.Count += other.Count
}

// errTooMany marks events that stand for different ones.
const errTooMany = "too many different events at once: names not kept"

// coarse is what is kept of an event when there are too many.
func (e *Event) coarse() Event {
	return Event{
		At: e.At, Phase: e.Phase, Kind: e.Kind, Denied: e.Denied, Rule: e.Rule, Sent: e.Sent, Received: e.Received,
		Duration: e.Duration, Count: e.Count, Error: errTooMany,
	}
}

// size is about how many bytes an event takes in the log.
func (e *Event) size() int {
	const fixed = 64 // numbers, and the record around it
	return fixed + len(e.Phase) + len(e.Rule) + len(e.Service) + len(e.Name) + len(e.Version) + len(e.Protocol) + len(e.Source) +
		len(e.Digest) + len(e.Error)
}

// mostText of one field, in bytes.
const mostText = 512

// clip makes every text harmless to the format.
func (e *Event) clip() {
	for _, s := range []*string{
		&e.Phase, &e.Rule, &e.Service, &e.Name, &e.Version, &e.Protocol, &e.Source, &e.Digest, &e.Error,
	} {
		if len(*s) > mostText {
			*s = strings.Clone((*s)[:mostText]) // not to hold the rest
		}
		if !utf8.ValidString(*s) {
			*s = strings.ToValidUTF8(*s, "\uFFFD")
		}
	}
}

// encode is the record of an event. Its number is the record's.
func (e *Event) encode(buf []byte) ([]byte, error) {
	m := sandseav1.NetworkEvent{
		At: timestamppb.New(e.At), Phase: e.Phase, Kind: e.Kind, Denied: e.Denied, Rule: e.Rule, Service: e.Service,
		Name: e.Name, Version: e.Version, Port: int32(e.Port), Protocol: e.Protocol, SentBytes: e.Sent,
		ReceivedBytes: e.Received, DurationUs: e.Duration.Microseconds(), Source: e.Source, Digest: e.Digest, Count: e.Count,
		Error: e.Error,
	}
	if e.Address.IsValid() {
		m.Address = e.Address.String()
	}
	return proto.MarshalOptions{}.MarshalAppend(buf, &m)
}
