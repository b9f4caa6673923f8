package apiserver

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/span"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
)

// An endpoint token opens one port of one sandbox, for who has it: "sse_" and the base64 of
//
//	HMAC-SHA256 of all that follows, with the id and the port | end in Unix milliseconds, 0 for none | project
//
// It names no caller and opens nothing else. The key is random, in the store, and the same for all servers; a token
// is kept nowhere and ends with its sandbox.
const (
	endpointMark   = "sse_"
	endpointFixed  = sha256.Size + 8
	maxEndpointTok = 512
)

var endpointText = base64.RawURLEncoding

// place is a port of a sandbox.
type place struct {
	id   sandbox.ID
	port uint16
}

// mintEndpoint makes a token; a zero end is the sandbox's.
func mintEndpoint(key []byte, at place, project string, end time.Time) string {
	var ms uint64
	if !end.IsZero() {
		ms = uint64(end.UnixMilli())
	}
	what := append(binary.BigEndian.AppendUint64(nil, ms), project...)
	return endpointMark + endpointText.EncodeToString(append(endpointMAC(key, at, what), what...))
}

func endpointMAC(key []byte, at place, what []byte) []byte {
	h := hmac.New(sha256.New, key)
	fmt.Fprintf(h, "sandsea endpoint 1\x00%s\x00%d\x00", at.id, at.port)
	h.Write(what)
	return h.Sum(nil)
}

// readEndpoint gives the project of a token for a port. Every token that was not made for it is Denied in the same
// words, one that was and has ended is Unauthenticated.
func readEndpoint(key []byte, at place, token string, now time.Time) (project string, err error) {
	wrong := errdefs.New(errdefs.Denied, "", "this token does not open port %d of this sandbox", at.port).
		WithHint("Ask for one: sandsea endpoint %s %d", at.id.Short(), at.port)
	text, ok := strings.CutPrefix(token, endpointMark)
	if !ok || len(text) > maxEndpointTok {
		return "", wrong
	}
	raw, err := endpointText.DecodeString(text)
	if err != nil || len(raw) < endpointFixed {
		return "", wrong
	}
	if !hmac.Equal(raw[:sha256.Size], endpointMAC(key, at, raw[sha256.Size:])) {
		return "", wrong
	}
	if ms := binary.BigEndian.Uint64(raw[sha256.Size:endpointFixed]); ms > 0 {
		if late := now.Sub(time.UnixMilli(int64(ms))); late >= 0 {
			return "", errdefs.New(errdefs.Unauthenticated, "", "this token of port %d ended %s ago", at.port, span.Short(late)).
				WithHint("Ask for another: sandsea endpoint %s %d", at.id.Short(), at.port)
		}
	}
	return string(raw[endpointFixed:]), nil
}

// endpointKey is the key of endpoint tokens, read once. The first server that needs it makes it.
type endpointKey struct {
	store store.Store
	known atomic.Pointer[[]byte]
}

// endpointSecret is the key as the store has it.
type endpointSecret struct {
	Key     []byte    `json:"key"`
	Created time.Time `json:"created"`
}

const endpointKeyBytes = 32

func (k *endpointKey) get(ctx context.Context) ([]byte, error) {
	if key := k.known.Load(); key != nil {
		return *key, nil
	}
	secret := endpointSecret{Key: make([]byte, endpointKeyBytes), Created: time.Now().UTC()}
	_, _ = rand.Read(secret.Key) // never fails: the runtime ends the process instead
	value, err := json.Marshal(secret)
	if err != nil {
		return nil, fmt.Errorf("encode the key of endpoint tokens: %w", err)
	}
	res, err := k.store.Txn(ctx, []store.Cond{{Key: keys.Endpoint, Absent: true}},
		[]store.Op{store.Put(keys.Endpoint, value)}, []store.Op{store.Get(keys.Endpoint)})
	if err != nil {
		return nil, errdefs.New(errdefs.Unavailable, "", "endpoint tokens cannot be checked, the store does not answer").
			WithRetryAfter(time.Second).Wrap(err)
	}
	if !res.Succeeded {
		secret = endpointSecret{}
		if len(res.Pairs) == 1 {
			err = json.Unmarshal(res.Pairs[0].Value, &secret)
		}
		if err != nil || len(secret.Key) != endpointKeyBytes {
			return nil, errdefs.New(errdefs.DataLoss, "store", "%s cannot be read", keys.Endpoint).Wrap(err)
		}
	}
	k.known.Store(&secret.Key)
	return secret.Key, nil
}
