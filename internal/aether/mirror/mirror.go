// Package mirror is the contract between Aether and its package services, one package each below this folder.
package mirror

import (
	"context"
	"net/http"

	"github.com/sandsea/sandsea/internal/policy"
)

// Service serves one ecosystem in its own protocol. A request's path begins behind the service's mount point
// ("/simple/six/" for http://100.64.0.1/pypi/simple/six/) and its context carries the Caller. It answers only what the
// caller's World shows, reports every artefact, and never sends a caller to another host.
type Service interface {
	http.Handler
	// Name as in policies: "pypi".
	Name() string
	// Match tells where in this service a URL of the ecosystem's own hosts leads, for requests that name such a host
	// instead of the mirror (a lock file's absolute URL, apt's sources): the path for ServeHTTP; false: no such place.
	Match(scheme, host, path string) (string, bool)
	// Hosts are the host names that Match knows, of the upstreams in force.
	Hosts() []string
}

// Caller is the sandbox that asks.
type Caller struct {
	Sandbox string
	Phase   string
	World   policy.World
	// Base is the absolute URL of the service as this caller reached it, without a slash at the end: links in answers
	// begin with it.
	Base string
	// Report takes one event for the flow log.
	Report func(Artefact)
}

// Artefact is what was asked of a service and what came of it.
type Artefact struct {
	Kind    string // list, metadata, file
	Name    string // package
	Version string
	Denied  bool
	Rule    string // that denied, or that made a list shorter
	Bytes   int64
	Source  string // cache or upstream
	Digest  string // SHA-256 in hexadecimal, of files
	Error   string
}

type callerKey struct{}

// WithCaller gives the context that a Service finds its Caller in.
func WithCaller(ctx context.Context, c *Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// CallerOf finds the Caller of a request.
func CallerOf(ctx context.Context) *Caller {
	c, _ := ctx.Value(callerKey{}).(*Caller)
	return c
}

// Denier is a Service whose clients show people the reason of a refusal only in a form of their own. It is Deny in that
// form, for callers that may use nothing of the service.
type Denier interface {
	Deny(w http.ResponseWriter, c *Caller, a Artefact, v policy.Verdict)
}

// Deny answers 403 with the rule's name in the header Sandsea-Rule and a sentence in the body, as every service does
// for what the caller's world lacks, and reports it.
func Deny(w http.ResponseWriter, c *Caller, a Artefact, v policy.Verdict) {
	a.Denied, a.Rule = true, v.Rule
	c.Report(a)
	w.Header().Set("Sandsea-Rule", v.Rule)
	http.Error(w, v.Reason+" (rule "+v.Rule+")", http.StatusForbidden)
}
