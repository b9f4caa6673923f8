package iam_test

import (
	"context"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/control/iam"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
	"github.com/sandsea/sandsea/internal/store/mem"
)

func bearer(token string) http.Header { return http.Header{"Authorization": {"Bearer " + token}} }

func service(t *testing.T, s store.Store) *iam.Service {
	t.Helper()
	svc, err := iam.New(t.Context(), iam.Config{Store: s})
	if err != nil {
		t.Fatal(err)
	}
	return svc
}

func TestAuthenticate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := mem.New(mem.Config{})
		svc := service(t, s)
		create := func(req iam.Request) string {
			token, err := svc.Create(t.Context(), req)
			if err != nil {
				t.Fatal(err)
			}
			return token
		}
		good := create(iam.Request{Principal: "user:ci", Project: "default/team", May: []string{"sandbox.*", "node.list"}})
		old := create(iam.Request{Principal: "user:ci", Project: "default", TTL: time.Hour})
		gone := create(iam.Request{Principal: "user:ci", Project: "default"})
		if err := svc.Revoke(t.Context(), gone); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * time.Hour) // synctest's clock
		otherSecret := good[:len(good)-1] + map[bool]string{true: "0", false: "1"}[good[len(good)-1] != '0']
		for _, tc := range []struct {
			name   string
			header http.Header
			text   string
		}{
			{"no header", http.Header{}, "no token. Set SANDSEA_TOKEN or SANDSEA_TOKEN_FILE"},
			{
				"two headers",
				http.Header{"Authorization": {"Bearer " + good, "Bearer " + good}},
				"2 Authorization headers. Send one",
			},
			{
				"another scheme",
				http.Header{"Authorization": {"Basic abc"}},
				"the Authorization header is no bearer token. Send: Bearer TOKEN",
			},
			{"an empty token", bearer(""), "this is no token of Sandsea. Tokens begin with sst_; set SANDSEA_TOKEN"},
			{
				"a JSON web token", bearer("eyJhbGciOiJub25lIn0.e30."),
				"this is no token of Sandsea. Tokens begin with sst_; set SANDSEA_TOKEN",
			},
			{
				"a path in the id", bearer("sst_../../../../iam/_" + strings.Repeat("0", 52)),
				"this is no token of Sandsea. Tokens begin with sst_; set SANDSEA_TOKEN",
			},
			{
				"an unknown id", bearer("sst_" + strings.Repeat("0", 16) + "_" + strings.Repeat("0", 52)),
				"this token is unknown or revoked. An admin makes one; set SANDSEA_TOKEN",
			},
			{"another secret", bearer(otherSecret), "this token is unknown or revoked. An admin makes one; set SANDSEA_TOKEN"},
			{"a revoked one", bearer(gone), "this token is unknown or revoked. An admin makes one; set SANDSEA_TOKEN"},
			{"an expired one", bearer(old), "token of user ci expired 2h ago. Ask an admin for a new one"},
		} {
			_, err := svc.Authenticate(t.Context(), tc.header)
			if !errors.Is(err, errdefs.Unauthenticated) || err.Error() != tc.text {
				t.Errorf("%s:\ngot  %v\nwant %s", tc.name, err, tc.text)
			}
		}
		c, err := svc.Authenticate(t.Context(), bearer(good))
		if err != nil || c.Principal != "user:ci" || c.Project != "default/team" || c.Covers[0] != "default/team" {
			t.Errorf("got %+v, %v", c, err)
		}
		for call, want := range map[string]bool{
			"sandbox.create": true, "node.list": true, "node.get": false, "image.import": false, "sandboxes.x": false,
		} {
			if err := c.Authorize(call); (err == nil) != want || err != nil && !errors.Is(err, errdefs.Denied) {
				t.Errorf("%s: got %v, want allowed %v", call, err, want)
			}
		}
		// Nothing that could be replayed is in the store.
		page, err := s.Range(t.Context(), keys.IAM, store.RangeOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range page.Pairs {
			if strings.Contains(string(p.Value), good[21:]) {
				t.Errorf("%s holds the secret", p.Key)
			}
		}
	})
}

func TestRevocationElsewhereHoldsWithin5s(t *testing.T) {
	for _, tc := range []struct {
		name string
		run  bool
	}{{"by the watch", true}, {"by asking again when no watch runs", false}} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := mem.New(mem.Config{})
				here, there := service(t, s), service(t, s)
				token, err := there.Create(t.Context(), iam.Request{Principal: "user:ci", Project: "default"})
				if err != nil {
					t.Fatal(err)
				}
				ctx, stop := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				if tc.run {
					wg.Go(func() { _ = here.Run(ctx) })
				}
				if _, err := here.Authenticate(ctx, bearer(token)); err != nil {
					t.Fatalf("a token made elsewhere: %v", err)
				}
				if err := there.Revoke(ctx, token); err != nil {
					t.Fatal(err)
				}
				time.Sleep(5 * time.Second)
				if _, err := here.Authenticate(ctx, bearer(token)); !errors.Is(err, errdefs.Unauthenticated) {
					t.Errorf("5 s after: got %v, want Unauthenticated", err)
				}
				stop()
				wg.Wait()
			})
		})
	}
}

func TestStoreAwayKeepsKnownCallersWorking(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := mem.New(mem.Config{})
		svc := service(t, s)
		token, err := svc.Create(t.Context(), iam.Request{Principal: "user:ci", Project: "default"})
		if err != nil {
			t.Fatal(err)
		}
		s.SetAway(true)
		time.Sleep(time.Minute)
		if _, err := svc.Authenticate(t.Context(), bearer(token)); err != nil {
			t.Errorf("known token: %v", err)
		}
		_, err = svc.Authenticate(t.Context(), bearer("sst_"+strings.Repeat("0", 16)+"_"+strings.Repeat("0", 52)))
		if !errors.Is(err, errdefs.Unavailable) {
			t.Errorf("unknown token: got %v, want Unavailable", err)
		}
	})
}

func TestCreateRefusesWhatIsNoPrincipalOrProject(t *testing.T) {
	svc := service(t, mem.New(mem.Config{}))
	for _, req := range []iam.Request{
		{Principal: "ci", Project: "default"},
		{Principal: "user:", Project: "default"},
		{
			Principal: "user:a b",
			Project:   "default",
		},
		{Principal: "user:ci", Project: ""},
		{Principal: "user:ci", Project: "/x"},
		{Principal: "user:ci", Project: "a//b"},
		{Principal: "user:ci", Project: "a=b"},
		{Principal: "user:ci", Project: "../x"},
		{Principal: "user:ci", Project: "default", Covers: []string{"A"}},
	} {
		if _, err := svc.Create(t.Context(), req); !errors.Is(err, errdefs.Invalid) {
			t.Errorf("%+v: got %v, want Invalid", req, err)
		}
	}
}

func readToken(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(file)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	return strings.TrimSpace(string(b))
}

func authenticates(t *testing.T, s store.Store, token string) bool {
	t.Helper()
	c, err := service(t, s).Authenticate(t.Context(), bearer(token))
	return err == nil && c.Principal == iam.Admin && c.Allowed("anything.at_all") && c.Project == "default"
}

func TestBootstrap(t *testing.T) {
	s := mem.New(mem.Config{})
	file := filepath.Join(t.TempDir(), "sub", "admin.token")
	boot := func() (iam.FirstRun, error) { return iam.Bootstrap(t.Context(), s, file) }

	first, err := boot()
	if err != nil || !first.New || first.Lost != "" {
		t.Fatalf("first: got %+v, %v", first, err)
	}
	token := readToken(t, file)
	if !authenticates(t, s, token) {
		t.Fatal("the token does not work")
	}
	if again, err := boot(); err != nil || again.New || readToken(t, file) != token {
		t.Errorf("second start: got %+v, %v", again, err)
	}

	if err := os.Chmod(file, 0o644); err != nil {
		t.Fatal(err)
	}
	_, err = boot()
	if want := file + ": others can read it (0644). Run: chmod 600 " + file; !errors.Is(err,
		errdefs.FailedPrecondition) || err.Error() != want {
		t.Errorf("open file: got %v, want %s", err, want)
	}

	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	lost, err := boot()
	if err != nil || lost.New || !strings.Contains(lost.Lost, "install -m 600 /dev/null "+file) {
		t.Errorf("lost file: got %+v, %v", lost, err)
	}
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	renewed, err := boot()
	if err != nil || !renewed.New {
		t.Errorf("empty file: got %+v, %v", renewed, err)
	}
	next := readToken(t, file)
	if next == token || !authenticates(t, s, next) || authenticates(t, s, token) {
		t.Error("the new token does not work, or the old one still does")
	}

	if err := os.WriteFile(file, []byte("sst_zzz\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := boot(); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("another token in the file: got %v, want FailedPrecondition", err)
	}

	// A new store with the file of an old one starts afresh.
	s = mem.New(mem.Config{})
	if afresh, err := boot(); err != nil || !afresh.New || !authenticates(t, s, readToken(t, file)) {
		t.Errorf("new store: got %+v, %v", afresh, err)
	}
}

// dying fails the nth transaction and all after it, as a process that is killed there.
type dying struct {
	store.Store
	left int
}

var errKilled = errors.New("killed")

func (d *dying) Txn(ctx context.Context, c []store.Cond, then, otherwise []store.Op) (store.Result, error) {
	if d.left--; d.left < 0 {
		return store.Result{}, errKilled
	}
	return d.Store.Txn(ctx, c, then, otherwise)
}

func TestBootstrapKilledAtEveryStepRecovers(t *testing.T) {
	for steps := range 4 {
		s := mem.New(mem.Config{})
		file := filepath.Join(t.TempDir(), "admin.token")
		_, err := iam.Bootstrap(t.Context(), &dying{s, steps}, file)
		if died := errors.Is(err, errKilled); died != (steps < 3) {
			t.Fatalf("%d steps: got %v", steps, err)
		}
		if steps == 2 {
			// Between hash and file: the rename never happened.
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
		}
		again, err := iam.Bootstrap(t.Context(), s, file)
		if err != nil || again.Lost != "" {
			t.Fatalf("start after %d steps: got %+v, %v", steps, again, err)
		}
		if !authenticates(t, s, readToken(t, file)) {
			t.Errorf("start after %d steps: the token does not work", steps)
		}
		page, err := s.Range(t.Context(), keys.IAMTokens, store.RangeOptions{})
		if err != nil || len(page.Pairs) != 1 {
			t.Errorf("start after %d steps: %d tokens are left, want 1", steps, len(page.Pairs))
		}
	}
}

func FuzzAuthorization(f *testing.F) {
	for _, seed := range []string{"Bearer sst_", "bearer x", "", "Bearer sst_0000000000000000_" + strings.Repeat("0",
		52), "Basic \x00"} {
		f.Add(seed)
	}
	s := mem.New(mem.Config{})
	svc, err := iam.New(context.Background(), iam.Config{Store: s})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, header string) {
		if c, err := svc.Authenticate(t.Context(), http.Header{"Authorization": {header}}); err == nil {
			t.Errorf("%q is %+v", header, c)
		}
	})
}
