// Package iam knows who calls and what they may do.
//
// A token is "sst_<id>_<secret>": the id finds the record, the secret is 256 random bits of which only the SHA-256 is
// kept (a random secret of that size needs no slow hash). Records live in the store; a Service holds a copy that it
// follows by a watch, so that a call costs no look-up and a revocation holds within 5 s. While the store is away the
// copy goes on answering: nobody can revoke then either. Safe for concurrent use.
//
// Projects are paths nested to any depth ("default/team/x"). Who covers a path covers what is below it.
package iam

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base32"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
)

// DefaultProject is the project of the first-run admin and the root of all others.
const DefaultProject = "default"

// fresh is the longest time for which the copy of a token is believed without a sign of the store.
const fresh = 5 * time.Second

// Caller is who an authenticated call comes from.
type Caller struct {
	// Principal is as "user:admin".
	Principal string
	// Project is where the caller works when it names none.
	Project string
	// Covers are the project paths that the caller sees, each with all below it.
	Covers []string
	// May holds "*", "sandbox.*" or calls as "sandbox.create".
	May []string
	// ExpiresAt is when the token ends; zero means never.
	ExpiresAt time.Time
}

// Allowed reports whether the caller may make the call, as "sandbox.create".
func (c Caller) Allowed(call string) bool {
	part, _, _ := strings.Cut(call, ".")
	return slices.ContainsFunc(c.May, func(m string) bool { return m == "*" || m == call || m == part+".*" })
}

// Authorize is nil when the caller may make the call, else Denied.
func (c Caller) Authorize(call string) error {
	if c.Allowed(call) {
		return nil
	}
	return errdefs.New(errdefs.Denied, c.Principal, "may not %s", call).WithHint("Ask an admin for the right")
}

// record is a token in the store.
type record struct {
	ID        string    `json:"id"`
	Hash      string    `json:"hash"` // hex of SHA-256
	Principal string    `json:"principal"`
	Project   string    `json:"project"`
	Covers    []string  `json:"covers"`
	May       []string  `json:"may"`
	Created   time.Time `json:"created"`
	Expires   time.Time `json:"expires,omitzero"`
}

func (r record) caller() Caller {
	return Caller{Principal: r.Principal, Project: r.Project, Covers: r.Covers, May: r.May, ExpiresAt: r.Expires}
}

// Config of a Service.
type Config struct {
	Store store.Store
	Log   *slog.Logger
	// Now is the clock; nil means time.Now.
	Now func() time.Time
}

// Service authenticates callers. Run keeps its copy of the tokens true.
type Service struct {
	store store.Store
	log   *slog.Logger
	now   func() time.Time
	// misses bounds how often unknown ids reach the store.
	misses *rate.Limiter
	live   atomic.Bool // the watch stands

	mu     sync.RWMutex
	tokens map[string]entry // guarded by mu
}

type entry struct {
	record
	checked time.Time
}

// New makes a Service with the tokens that the store has now.
func New(ctx context.Context, cfg Config) (*Service, error) {
	s := &Service{
		store: cfg.Store, log: cfg.Log, now: cfg.Now, misses: rate.NewLimiter(100, 100), tokens: map[string]entry{},
	}
	if s.now == nil {
		s.now = time.Now
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	if _, err := s.load(ctx); err != nil {
		return nil, fmt.Errorf("read the tokens: %w", err)
	}
	return s, nil
}

// Run follows the store until ctx ends.
func (s *Service) Run(ctx context.Context) error {
	store.Repeat(ctx, s.log, "tokens", func(ctx context.Context) error {
		rev, err := s.load(ctx)
		if err != nil {
			return err
		}
		s.live.Store(true)
		defer s.live.Store(false)
		return s.follow(ctx, rev)
	})
	return context.Cause(ctx)
}

func (s *Service) load(ctx context.Context) (int64, error) {
	page, err := s.store.Range(ctx, keys.IAMTokens, store.RangeOptions{})
	if err != nil {
		return 0, err
	}
	tokens := make(map[string]entry, len(page.Pairs))
	for _, p := range page.Pairs {
		if r, err := decode(p); err == nil {
			tokens[r.ID] = entry{r, s.now()}
		} else {
			s.log.Warn("record of a token cannot be read", "key", p.Key, "err", err)
		}
	}
	s.mu.Lock()
	s.tokens = tokens
	s.mu.Unlock()
	return page.Revision, nil
}

func (s *Service) follow(ctx context.Context, rev int64) error {
	for e, err := range s.store.Watch(ctx, keys.IAMTokens, rev) {
		if err != nil {
			return err
		}
		id := strings.TrimPrefix(e.Key, keys.IAMTokens)
		r, derr := decode(e.Pair)
		s.mu.Lock()
		if e.Deleted || derr != nil {
			delete(s.tokens, id)
		} else {
			s.tokens[id] = entry{r, s.now()}
		}
		s.mu.Unlock()
	}
	return nil
}

func decode(p store.Pair) (record, error) {
	var r record
	if p.Value == nil {
		return r, errors.New("no value")
	}
	if err := json.Unmarshal(p.Value, &r); err != nil {
		return r, fmt.Errorf("token record %s: %w", p.Key, err)
	}
	if keys.Token(r.ID) != p.Key || len(r.Hash) != 2*sha256.Size {
		return r, fmt.Errorf("token record %s: holds another token or no hash", p.Key)
	}
	return r, nil
}

// Authenticate finds the caller in the headers of a request: one Authorization header with a bearer token.
func (s *Service) Authenticate(ctx context.Context, h http.Header) (Caller, error) {
	values := h.Values("Authorization")
	if len(values) == 0 {
		return Caller{}, unauthenticated("no token").WithHint("Set SANDSEA_TOKEN or SANDSEA_TOKEN_FILE")
	}
	if len(values) > 1 {
		return Caller{}, unauthenticated("%d Authorization headers", len(values)).WithHint("Send one")
	}
	scheme, token, ok := strings.Cut(values[0], " ")
	if !ok || !strings.EqualFold(scheme, "bearer") {
		return Caller{}, unauthenticated("the Authorization header is no bearer token").WithHint("Send: Bearer TOKEN")
	}
	id, secret, err := split(strings.TrimSpace(token))
	if err != nil {
		return Caller{}, err
	}
	r, err := s.find(ctx, id)
	if err != nil {
		return Caller{}, err
	}
	if !matches(r, secret) {
		return Caller{}, unknownToken()
	}
	if now := s.now(); !r.Expires.IsZero() && !now.Before(r.Expires) {
		kind, name, _ := strings.Cut(r.Principal, ":")
		return Caller{}, unauthenticated("token of %s %s expired %s ago", kind, name, age(now.Sub(r.Expires))).
			WithHint("Ask an admin for a new one")
	}
	return r.caller(), nil
}

// Holds reports whether the headers of a request hold what may be a token of the platform, whether or not it is one that
// anybody knows now.
func Holds(h http.Header) bool {
	return slices.ContainsFunc(h.Values("Authorization"), func(value string) bool {
		return slices.ContainsFunc(strings.Fields(value), func(word string) bool {
			_, _, err := split(word)
			return err == nil
		})
	})
}

// find gives the record with that id from the copy, or from the store when the copy may be behind.
func (s *Service) find(ctx context.Context, id string) (record, error) {
	s.mu.RLock()
	e, known := s.tokens[id]
	s.mu.RUnlock()
	if known && (s.live.Load() || s.now().Sub(e.checked) < fresh) {
		return e.record, nil
	}
	if !known && !s.misses.Allow() {
		return record{}, unknownToken()
	}
	res, err := s.store.Txn(ctx, nil, []store.Op{store.Get(keys.Token(id))}, nil)
	switch {
	case err != nil && known:
		// The store is away: nobody can have revoked it through the store that we cannot reach, and what runs goes on.
		s.remember(e.record)
		return e.record, nil
	case err != nil:
		return record{}, errdefs.New(errdefs.Unavailable, "token", "cannot be checked, the store does not answer").
			WithRetryAfter(time.Second).Wrap(err)
	case len(res.Pairs) == 0:
		s.mu.Lock()
		delete(s.tokens, id)
		s.mu.Unlock()
		return record{}, unknownToken()
	}
	r, err := decode(res.Pairs[0])
	if err != nil {
		return record{}, errdefs.New(errdefs.DataLoss, "token", "its record cannot be read").Wrap(err)
	}
	s.remember(r)
	return r, nil
}

func (s *Service) remember(r record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tokens[r.ID] = entry{r, s.now()}
}

// Request is what a new token is to be.
type Request struct {
	Principal string // "user:ci"
	Project   string
	// Covers defaults to Project alone.
	Covers []string
	// May defaults to everything.
	May []string
	// TTL is how long it holds; 0 means for ever.
	TTL time.Duration
}

// Create makes a token and returns it; it cannot be had again.
func (s *Service) Create(ctx context.Context, req Request) (string, error) {
	kind, name, ok := strings.Cut(req.Principal, ":")
	if !ok || kind == "" || name == "" || len(req.Principal) > 256 || strings.ContainsAny(req.Principal, " \t\n\r,") {
		return "", errdefs.New(errdefs.Invalid, "", "principal %q", req.Principal).WithField("principal", "").
			WithHint("Write kind:name, as user:ci")
	}
	if len(req.Covers) == 0 {
		req.Covers = []string{req.Project}
	}
	for _, p := range append([]string{req.Project}, req.Covers...) {
		if err := CheckProject(p); err != nil {
			return "", err
		}
	}
	if len(req.May) == 0 {
		req.May = []string{"*"}
	}
	token, r := mint(req, s.now())
	value, err := json.Marshal(r)
	if err != nil {
		return "", fmt.Errorf("encode a token: %w", err)
	}
	key := keys.Token(r.ID)
	res, err := s.store.Txn(ctx, []store.Cond{{Key: key, Absent: true}}, []store.Op{store.Put(key, value)}, nil)
	if err != nil {
		return "", fmt.Errorf("write a token: %w", err)
	}
	if !res.Succeeded {
		return "", errdefs.New(errdefs.Internal, "token", "two random ids were equal")
	}
	s.remember(r)
	return token, nil
}

// Revoke ends a token, named by itself or its id. Again is success.
func (s *Service) Revoke(ctx context.Context, token string) error {
	id := token
	if t, _, err := split(token); err == nil {
		id = t
	}
	if strings.Trim(id, alphabet) != "" || id == "" {
		return errdefs.New(errdefs.Invalid, "", "%q is no token id", id).WithHint("Give the part between the underscores")
	}
	if _, err := s.store.Txn(ctx, nil, []store.Op{store.Delete(keys.Token(id))}, nil); err != nil {
		return fmt.Errorf("revoke token %s: %w", id, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.tokens, id)
	return nil
}

// CheckProject checks a project path.
func CheckProject(p string) error {
	bad := func(what string) error {
		return errdefs.New(errdefs.Invalid, "", "project %q %s", p, what).WithField("project", "").
			WithHint("Use elements of a-z, 0-9, - and _ with / between, as default/team")
	}
	if p == "" || len(p) > 256 {
		return bad("is empty or longer than 256 bytes")
	}
	for e := range strings.SplitSeq(p, "/") {
		if e == "" || strings.Trim(e, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
			return bad("is no path")
		}
	}
	return nil
}

const (
	prefix   = "sst"
	alphabet = "0123456789abcdefghjkmnpqrstvwxyz"
	idBytes  = 10
)

var encoding = base32.NewEncoding(alphabet).WithPadding(base32.NoPadding)

func mint(req Request, now time.Time) (string, record) {
	var raw [idBytes + 32]byte
	_, _ = rand.Read(raw[:]) // never fails: the runtime ends the process instead
	id, secret := encoding.EncodeToString(raw[:idBytes]), encoding.EncodeToString(raw[idBytes:])
	hash := sha256.Sum256([]byte(secret))
	r := record{
		ID: id, Hash: hex.EncodeToString(hash[:]), Principal: req.Principal, Project: req.Project, Covers: req.Covers,
		May: req.May, Created: now.UTC(),
	}
	if req.TTL > 0 {
		r.Expires = now.UTC().Add(req.TTL)
	}
	return prefix + "_" + id + "_" + secret, r
}

func split(token string) (id, secret string, err error) {
	parts := strings.Split(token, "_")
	if len(parts) != 3 || parts[0] != prefix || len(parts[1]) != 16 || len(parts[2]) != 52 ||
		strings.Trim(parts[1]+parts[2], alphabet) != "" {
		return "", "", unauthenticated("this is no token of Sandsea").WithHint("Tokens begin with sst_; set SANDSEA_TOKEN")
	}
	return parts[1], parts[2], nil
}

func matches(r record, secret string) bool {
	hash := sha256.Sum256([]byte(secret))
	want, err := hex.DecodeString(r.Hash)
	return err == nil && subtle.ConstantTimeCompare(hash[:], want) == 1
}

func unauthenticated(format string, args ...any) *errdefs.Error {
	return errdefs.New(errdefs.Unauthenticated, "", format, args...)
}

// unknownToken says the same for an unknown id, a wrong secret and a revoked token.
func unknownToken() error {
	return unauthenticated("this token is unknown or revoked").WithHint("An admin makes one; set SANDSEA_TOKEN")
}

// age writes a duration in one unit: "2s", "3m", "2h", "5d".
func age(d time.Duration) string {
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	default:
		return fmt.Sprintf("%dd", int(d.Hours()/24))
	}
}
