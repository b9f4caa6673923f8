package debian_test

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandsea/sandsea/internal/aether/cache"
	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/aether/mirror/debian"
	"github.com/sandsea/sandsea/internal/aether/mirror/source"
	"github.com/sandsea/sandsea/internal/aether/mirror/source/sourcetest"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/policy"
)

func sum(s string) string {
	h := sha256.Sum256([]byte(s))
	return hex.EncodeToString(h[:])
}

// archive is a small one on an upstream, below a folder of it.
type archive struct {
	*sourcetest.Upstream
	folder string // "/debian"
}

// debFile is where a binary package lies.
func debFile(name, version string) string {
	return "pool/main/" + name[:1] + "/src-" + name + "/" + name + "_" + version + "_all.deb"
}

// publish sets a suite with packages "name version", and the packages' files.
func (a archive) publish(suite string, date time.Time, validUntil time.Time, packages ...string) {
	a.publishAt(suite, date, validUntil, debFile, packages...)
}

// publishAt is publish for an archive that puts its files elsewhere.
func (a archive) publishAt(suite string, date time.Time, validUntil time.Time, place func(name, version string) string, packages ...string) {
	var index strings.Builder
	for _, p := range packages {
		name, version, _ := strings.Cut(p, " ")
		file := place(name, version)
		fmt.Fprintf(&index, "Package: %s\nVersion: %s\nArchitecture: all\nFilename: %s\nSize: %d\nSHA256: %s\n\n", name, version, file, len(p), sum(p))
		a.Put(a.folder+"/"+file, p)
	}
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	_, _ = z.Write([]byte(index.String()))
	_ = z.Close()
	files := map[string]string{"main/binary-all/Packages": index.String(), "main/binary-all/Packages.gz": packed.String()}
	var rel strings.Builder
	fmt.Fprintf(&rel, "Origin: Test\nSuite: %s\nCodename: %s\nVersion: 12.1\nDate: %s\n", suite, suite, date.Format(http.TimeFormat))
	if !validUntil.IsZero() {
		fmt.Fprintf(&rel, "Valid-Until: %s\n", validUntil.Format(http.TimeFormat))
	}
	rel.WriteString("Acquire-By-Hash: yes\nArchitectures: all\nComponents: main\nSHA256:\n")
	for _, name := range slices.Sorted(maps.Keys(files)) {
		body := files[name]
		fmt.Fprintf(&rel, " %s %d %s\n", sum(body), len(body), name)
		a.Put(a.folder+"/dists/"+suite+"/"+name, body)
		a.Put(a.folder+"/dists/"+suite+"/main/binary-all/by-hash/SHA256/"+sum(body), body)
	}
	a.Put(a.folder+"/dists/"+suite+"/Release", rel.String())
	a.Put(a.folder+"/dists/"+suite+"/InRelease", "-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA256\n\n"+rel.String()+
		"-----BEGIN PGP SIGNATURE-----\n\nx\n-----END PGP SIGNATURE-----\n")
}

// start serves the archives of an upstream; below is the path of the first, "/127.0.0.1/debian".
func start(t testing.TB, w policy.World, files ...string) (a archive, m *sourcetest.Mount, below string) {
	t.Helper()
	a = archive{sourcetest.NewUpstream(t), "/debian"}
	u := upstream.Upstream{URLs: []string{a.URL + "/debian", a.URL + "/debian-security"}}
	for _, f := range files {
		u.Files = append(u.Files, strings.ReplaceAll(f, "UPSTREAM", a.URL))
	}
	s := debian.New(sourcetest.NewSource(t, u), u, slog.New(slog.DiscardHandler))
	t.Cleanup(func() { _ = s.Close() })
	return a, sourcetest.Serve(t, s, w), "/127.0.0.1/debian"
}

func TestASuiteIsThereUpToItsDate(t *testing.T) {
	a, m, below := start(t, policy.World{})
	a.publish("stable", sourcetest.Day("2024-06-01"), time.Time{}, "hello 1.0")
	files := []string{"InRelease", "Release", "main/binary-all/Packages.gz", "main/binary-all/Packages"}
	for _, c := range []struct {
		world policy.World
		rule  string // "": it is there
	}{
		{policy.World{}, ""},
		{policy.World{AsOf: sourcetest.Day("2024-06-02")}, ""},
		{policy.World{AsOf: sourcetest.Day("2024-05-31")}, policy.RuleAsOf + " 2024-05-31"},
	} {
		m.In(c.world)
		for _, f := range files {
			got := m.Get(below + "/dists/stable/" + f)
			if got.Rule() != c.rule || (got.Status == http.StatusOK) != (c.rule == "") {
				t.Errorf("%s as of %s: %d, rule %q, want %q", f, c.world.AsOf, got.Status, got.Rule(), c.rule)
			}
		}
	}
}

func TestAPoolsFileIsAsOldAsTheIndexThatListsIt(t *testing.T) {
	a, m, below := start(t, policy.World{AsOf: sourcetest.Day("2024-06-02")})
	a.publish("stable", sourcetest.Day("2024-06-01"), time.Time{}, "hello 1.0", "pinned 3.0")
	a.Put("/debian/"+debFile("hello", "2.0"), "hello 2.0") // of later
	old := below + "/" + debFile("hello", "1.0")
	if got := m.Get(old); got.Rule() != policy.RuleUndated || !strings.Contains(got.Body, "apt-get update") {
		t.Errorf("before any index was seen: %d, rule %q, %s", got.Status, got.Rule(), got.Body)
	}
	if got := m.Get(below + "/dists/stable/main/binary-all/Packages.gz"); got.Status != http.StatusOK {
		t.Fatalf("index: %d %s", got.Status, got.Body)
	}
	if got := m.Get(old); got.Body != "hello 1.0" {
		t.Errorf("listed file: %d %s", got.Status, got.Body)
	}
	later := below + "/" + debFile("hello", "2.0")
	if got := m.Get(later); got.Rule() != policy.RuleUndated {
		t.Errorf("file that no index lists: %d, rule %q", got.Status, got.Rule())
	}
	m.In(policy.World{AsOf: sourcetest.Day("2024-06-02"), Pin: []string{"debian:hello@2.0"}})
	if got := m.Get(later); got.Body != "hello 2.0" {
		t.Errorf("pinned file: %d %s", got.Status, got.Body)
	}
	m.In(policy.World{AsOf: sourcetest.Day("2024-01-01")})
	if got := m.Get(old); got.Rule() != policy.RuleAsOf+" 2024-01-01" {
		t.Errorf("listed later than the world: %d, rule %q", got.Status, got.Rule())
	}
	m.In(policy.World{})
	for _, p := range []string{old, later} {
		if got := m.Get(p); got.Status != http.StatusOK {
			t.Errorf("%s today: %d", p, got.Status)
		}
	}
}

func TestIndexesAreReadAgainWhenWhatTheyToldWasDropped(t *testing.T) {
	a := archive{sourcetest.NewUpstream(t), "/debian"}
	u := upstream.Upstream{URLs: []string{a.URL + "/debian"}}
	s := debian.New(sourcetest.NewSource(t, u), u, slog.New(slog.DiscardHandler))
	t.Cleanup(func() { _ = s.Close() })
	s.ListAtMost(2)
	a.publish("stable", sourcetest.Day("2024-06-01"), time.Time{}, "hello 1.0")
	m := sourcetest.Serve(t, s, policy.World{AsOf: sourcetest.Day("2024-06-02")})
	below := "/127.0.0.1/debian/"
	if got := m.Get(below + "dists/stable/main/binary-all/Packages.gz"); got.Status != http.StatusOK {
		t.Fatalf("index: %d %s", got.Status, got.Body)
	}
	for _, when := range []string{"read", "dropped"} {
		if got := m.Get(below + debFile("hello", "1.0")); got.Body != "hello 1.0" {
			t.Errorf("a listed file, its index %s: %d %s", when, got.Status, got.Body)
		}
		for _, other := range []string{"x", "y"} {
			s.List(a.URL+"/debian", "pool/main/o/other/"+other+"_1_all.deb", sum(other))
		}
	}
}

func TestByHashNamesAreIndexesToo(t *testing.T) {
	a, m, below := start(t, policy.World{AsOf: sourcetest.Day("2024-06-02")})
	a.publish("stable", sourcetest.Day("2024-06-01"), time.Time{}, "hello 1.0")
	rel := m.Get(below + "/dists/stable/Release").Body
	var hash string
	for line := range strings.Lines(rel) {
		if f := strings.Fields(line); len(f) == 3 && strings.HasSuffix(f[2], "Packages.gz") {
			hash = f[0]
		}
	}
	if got := m.Get(below + "/dists/stable/main/binary-all/by-hash/SHA256/" + hash); got.Status != http.StatusOK {
		t.Fatalf("by-hash: %d %s", got.Status, got.Body)
	}
	if got := m.Get(below + "/" + debFile("hello", "1.0")); got.Body != "hello 1.0" {
		t.Errorf("listed file: %d %s", got.Status, got.Body)
	}
}

// A client whose lists are still right asks for Release files only, also of a mirror that was started anew.
func TestIndexesThatNobodyAsksForAreReadWhenNeeded(t *testing.T) {
	a, m, below := start(t, policy.World{AsOf: sourcetest.Day("2024-06-02")})
	a.publish("stable", sourcetest.Day("2024-06-01"), time.Time{}, "hello 1.0")
	if got := m.Get(below+"/dists/stable/InRelease", "If-Modified-Since", "Sun, 02 Jun 2024 00:00:00 GMT"); got.Status >= 400 {
		t.Fatalf("InRelease: %d %s", got.Status, got.Body)
	}
	if got := m.Get(below + "/" + debFile("hello", "1.0")); got.Body != "hello 1.0" {
		t.Errorf("listed file: %d %s", got.Status, got.Body)
	}
	if got := m.Get(below + "/" + debFile("hello", "2.0")); got.Rule() != policy.RuleUndated {
		t.Errorf("file that no index lists: %d, rule %q", got.Status, got.Rule())
	}
}

func TestIndexesAreFoundForFilesWhosePlaceTellsNoComponent(t *testing.T) {
	for _, file := range []string{"dists/stable/pool/hello_1.0_all.deb", "pool/amd64/main/hello_1.0_all.deb", "pool/hello_1.0_all.deb"} {
		a, m, below := start(t, policy.World{AsOf: sourcetest.Day("2024-06-02")})
		a.publishAt("stable", sourcetest.Day("2024-06-01"), time.Time{}, func(string, string) string { return file }, "hello 1.0")
		if got := m.Get(below + "/dists/stable/InRelease"); got.Status != http.StatusOK {
			t.Fatalf("release: %d %s", got.Status, got.Body)
		}
		if got := m.Get(below + "/" + file); got.Body != "hello 1.0" {
			t.Errorf("%s: %d %s", file, got.Status, got.Body)
		}
	}
}

func TestAnIndexMayBeThereInOneFormOnly(t *testing.T) {
	a, m, below := start(t, policy.World{AsOf: sourcetest.Day("2024-06-02")})
	a.publish("stable", sourcetest.Day("2024-06-01"), time.Time{}, "hello 1.0")
	for path := range a.Files() {
		if strings.HasSuffix(path, "Packages.gz") || strings.Contains(path, "by-hash") && !strings.HasPrefix(a.Files()[path], "Package:") {
			a.PutFile(path, sourcetest.File{Status: http.StatusNotFound})
		}
	}
	if got := m.Get(below + "/dists/stable/main/binary-all/Packages"); got.Status != http.StatusOK {
		t.Fatalf("index: %d %s", got.Status, got.Body)
	}
	if got := m.Get(below + "/" + debFile("hello", "1.0")); got.Body != "hello 1.0" {
		t.Errorf("listed file: %d %s", got.Status, got.Body)
	}
}

func TestPackagesBesideAPool(t *testing.T) {
	a, m, below := start(t, policy.World{Deny: []string{"debian:hello"}})
	a.Put("/debian/dists/stable/pool/x/hello_1.0_amd64.deb", "hello")
	a.Put("/debian/binary/hello_1.0_amd64.deb", "hello")
	for _, p := range []string{"/dists/stable/pool/x/hello_1.0_amd64.deb", "/binary/hello_1.0_amd64.deb"} {
		if got := m.Get(below + p); !strings.HasPrefix(got.Rule(), policy.RuleDeny) {
			t.Errorf("%s: %d, rule %q", p, got.Status, got.Rule())
		}
	}
	m.In(policy.World{})
	if got := m.Get(below + "/binary/hello_1.0_amd64.deb"); got.Body != "hello" {
		t.Errorf("not denied: %d", got.Status)
	}
}

func TestHistoryIsReadAsOfTheDate(t *testing.T) {
	a, m, below := start(t, policy.World{}, "UPSTREAM/snapshot/debian/%7Bdate%7D")
	a.publish("stable", sourcetest.Day("2025-06-01"), time.Time{}, "hello 2.0")
	old := archive{a.Upstream, "/snapshot/debian/20240602T000000Z"}
	old.publish("stable", sourcetest.Day("2024-06-01"), sourcetest.Day("2024-06-08"), "hello 1.0")
	index, file1, file2 := below+"/dists/stable/main/binary-all/Packages", below+"/"+debFile("hello", "1.0"), below+"/"+debFile("hello", "2.0")

	m.In(policy.World{AsOf: sourcetest.Day("2024-06-02")})
	if got := m.Get(index); !strings.Contains(got.Body, "Version: 1.0") {
		t.Errorf("index of the day: %d %s", got.Status, got.Body)
	}
	if got := m.Get(file1); got.Body != "hello 1.0" {
		t.Errorf("file of the day: %d %s", got.Status, got.Body)
	}
	if got := m.Get(file2); got.Status != http.StatusForbidden {
		t.Errorf("file of later: %d %s", got.Status, got.Body)
	}
	m.In(policy.World{})
	if got := m.Get(index); !strings.Contains(got.Body, "Version: 2.0") {
		t.Errorf("index of today: %d %s", got.Status, got.Body)
	}
}

func TestExpiredReleasesAreRefusedByTheWorldsClock(t *testing.T) {
	a, m, below := start(t, policy.World{})
	a.publish("stable", sourcetest.Day("2024-06-01"), sourcetest.Day("2024-06-08"), "hello 1.0")
	if got := m.Get(below + "/dists/stable/InRelease"); got.Status != http.StatusBadGateway || !strings.Contains(got.Body, "valid until 2024-06-08") {
		t.Errorf("expired: %d %s", got.Status, got.Body)
	}
	m.In(policy.World{AsOf: sourcetest.Day("2024-06-07")})
	if got := m.Get(below + "/dists/stable/InRelease"); got.Status != http.StatusOK {
		t.Errorf("valid at the world's date: %d %s", got.Status, got.Body)
	}
	m.In(policy.World{AsOf: sourcetest.Day("2024-06-09")})
	if got := m.Get(below + "/dists/stable/InRelease"); got.Status != http.StatusBadGateway {
		t.Errorf("expired at the world's date: %d %s", got.Status, got.Body)
	}
}

func TestReleasesDoNotExpireOffline(t *testing.T) {
	a := archive{sourcetest.NewUpstream(t), "/debian"}
	a.publish("stable", time.Now().Add(-48*time.Hour), time.Now().Add(-time.Hour), "hello 1.0")
	u := upstream.Upstream{URLs: []string{a.URL + "/debian"}}
	config := cache.Config{Dir: filepath.Join(t.TempDir(), "cache"), Log: slog.New(slog.DiscardHandler)}
	for _, config.Offline = range []bool{false, true} {
		c, err := cache.Open(config)
		if err != nil {
			t.Fatal(err)
		}
		s := debian.New(source.Source{Cache: c, Client: upstream.NewClient(http.DefaultTransport, u)}, u, config.Log)
		m := sourcetest.Serve(t, s, policy.World{})
		got := m.Get("/127.0.0.1/debian/dists/stable/InRelease")
		if want := map[bool]int{false: http.StatusBadGateway, true: http.StatusOK}[config.Offline]; got.Status != want {
			t.Errorf("offline %t: %d %s", config.Offline, got.Status, got.Body)
		}
		if err := errors.Join(s.Close(), c.Close()); err != nil {
			t.Fatal(err)
		}
		// It came when it was still valid.
		files, err := filepath.Glob(filepath.Join(config.Dir, "objects", "*", "*"))
		if err != nil || len(files) == 0 {
			t.Fatalf("%d objects: %v", len(files), err)
		}
		for _, f := range files {
			if err := os.Chtimes(f, time.Time{}, time.Now().Add(-2*time.Hour)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestDeniedPackages(t *testing.T) {
	a, m, below := start(t, policy.World{})
	a.publish("stable", sourcetest.Day("2024-06-01"), time.Time{}, "hello 1:1.0")
	for _, c := range []struct {
		entry, file string
		denied      bool
	}{
		{"debian:hello", "pool/main/h/src-hello/hello_1.0-1_amd64.deb", true},
		{"debian:HELLO", "pool/main/h/src-hello/hello_1.0-1_amd64.deb", true},
		{"debian:src-hello", "pool/main/h/src-hello/hello_1.0-1_amd64.deb", true},
		{"debian:src-hello", "pool/main/h/src-hello/libhello-dev_1.0-1_amd64.deb", true},
		{"debian:src-hello", "pool/main/h/src-hello/src-hello_1.0.orig.tar.xz", true},
		{"debian:src:src-hello", "pool/main/h/src-hello/src-hello_1.0-1.dsc", true},
		{"debian:src:src-hello", "pool/main/h/src-hello/src-hello_1.0-1.debian.tar.xz", true},
		{"debian:hello@1.0-1", "pool/main/h/src-hello/hello_1.0-1_amd64.deb", true},
		{"debian:hello@1:1.0-1", "pool/main/h/src-hello/hello_1.0-1_amd64.deb", true},
		{"debian:hello@1.0-1", "pool/main/h/src-hello/hello_1%253a1.0-1_amd64.deb", true},
		{"debian:src:src-hello@1.0-1", "pool/main/h/src-hello/libhello_1.0-1+b3_arm64.deb", true},
		{"debian:hello@1.0-1", "pool/main/h/src-hello/hello_1.0-2_amd64.deb", false},
		{"debian:hello", "pool/main/h/src-hello/hello-doc_1.0-1_all.deb", false},
		{"debian:hello", "pool/main/h/src-hello/%68ello_1.0-1_amd64.udeb", true},
	} {
		m.In(policy.World{Deny: []string{c.entry}})
		got := m.Get(below + "/" + c.file)
		if denied := got.Status == http.StatusForbidden && strings.HasPrefix(got.Rule(), policy.RuleDeny); denied != c.denied {
			t.Errorf("%s with %s denied: got %d, rule %q", c.file, c.entry, got.Status, got.Rule())
		}
	}
	for path := range a.Asked() {
		if !strings.Contains(path, "hello_1.0-2") && !strings.Contains(path, "hello-doc") {
			t.Errorf("asked upstream for %s", path)
		}
	}
}

func TestWrongBytesBreakOff(t *testing.T) {
	a, m, below := start(t, policy.World{})
	a.publish("stable", sourcetest.Day("2024-06-01"), time.Time{}, "hello 1.0", "more 1.0")
	index := "/debian/dists/stable/main/binary-all/Packages"
	a.Put(index, "Package: evil\n")
	if got := m.Get(below + "/dists/stable/main/binary-all/Packages"); !got.Broken && got.Status == http.StatusOK {
		t.Errorf("wrong index: %d %q", got.Status, got.Body)
	}
	hash := sum("right")
	a.Put("/debian/dists/stable/main/binary-all/by-hash/SHA256/"+hash, "wrong")
	if got := m.Get(below + "/dists/stable/main/binary-all/by-hash/SHA256/" + hash); !got.Broken && got.Status == http.StatusOK {
		t.Errorf("wrong by-hash: %d %q", got.Status, got.Body)
	}
	if got := m.Get(below + "/dists/stable/main/binary-all/Packages.gz"); got.Status != http.StatusOK {
		t.Fatalf("index: %d %s", got.Status, got.Body)
	}
	// With a date in force, the answer waits until the index has been read.
	m.In(policy.World{AsOf: sourcetest.Day("2024-06-02")})
	if got := m.Get(below + "/" + debFile("more", "1.0")); got.Body != "more 1.0" {
		t.Fatalf("right file: %d %s", got.Status, got.Body)
	}
	m.In(policy.World{})
	a.Put("/debian/"+debFile("hello", "1.0"), "hello 1.1")
	if got := m.Get(below + "/" + debFile("hello", "1.0")); !got.Broken && got.Status == http.StatusOK {
		t.Errorf("wrong file: %d %q", got.Status, got.Body)
	}
}

func TestUnknownAndMalformed(t *testing.T) {
	a, m, below := start(t, policy.World{})
	a.publish("stable", sourcetest.Day("2024-06-01"), time.Time{}, "hello 1.0")
	a.Put("/secret", "x")
	for _, path := range []string{
		below + "/dists/none/InRelease", below + "/dists/stable/none", below + "/pool/main/h/src-hello/hello_9_all.deb",
		below + "/pool/main/h/src-hello/hello", below + "/pool/..%2f..%2fsecret", below + "/dists/..%2f..%2fsecret", below + "/README",
		"/other.test/debian/dists/stable/InRelease", "/", below,
	} {
		if got := m.Get(path); got.Status != http.StatusNotFound {
			t.Errorf("%s: got %d %s", path, got.Status, got.Body)
		}
	}
	a.Put("/debian/dists/bad/InRelease", "<html>")
	if got := m.Get(below + "/dists/bad/InRelease"); got.Status != http.StatusBadGateway {
		t.Errorf("no Release file: %d", got.Status)
	}
}

func TestMatchKnowsAllAddresses(t *testing.T) {
	u := upstream.Upstream{
		URLs:  []string{"http://mirror.test/linux/debian", "http://mirror.test/linux/debian-security"},
		Files: []string{"http://images.test/debian", "https://history.test/archive/debian/%7Bdate%7D"},
	}
	s := debian.New(sourcetest.NewSource(t, u), u, slog.New(slog.DiscardHandler))
	defer s.Close()
	for _, c := range []struct{ host, path, want string }{
		{"mirror.test", "/linux/debian/dists/x/InRelease", "/mirror.test/linux/debian/dists/x/InRelease"},
		{"Mirror.test", "/linux/debian-security/dists/x/InRelease", "/mirror.test/linux/debian-security/dists/x/InRelease"},
		{"images.test", "/debian/dists/x/InRelease", "/images.test/debian/dists/x/InRelease"},
		{"images.test", "/debian-security/dists/x/InRelease", ""},
		{"mirror.test", "/else", ""},
		{"history.test", "/archive/debian/x", ""},
	} {
		got, ok := s.Match("http", c.host, c.path)
		if ok != (c.want != "") || ok && got != c.want {
			t.Errorf("%s%s: got %q %v, want %q", c.host, c.path, got, ok, c.want)
		}
	}
	if diff := cmp.Diff([]string{"mirror.test", "images.test"}, s.Hosts()); diff != "" {
		t.Error(diff)
	}
}

var _ mirror.Service = (*debian.Service)(nil)
