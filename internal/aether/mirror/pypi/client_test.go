package pypi

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/aether/cache"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/testkit/require"
)

// pip runs the machine's own, with no configuration but the mirror, and installs into a new directory.
func (b *bed) pip(args ...string) (installed map[string]string, output string, err error) {
	b.t.Helper()
	dir := b.t.TempDir()
	target := filepath.Join(dir, "site")
	all := append([]string{
		"-m", "pip", "install", "--no-cache-dir", "--disable-pip-version-check", "--retries", "1", "--target", target,
		"--index-url", b.web.URL + "/pypi/simple/", "--only-binary", ":all:",
	}, args...)
	cmd := exec.CommandContext(b.t.Context(), "python3", all...)
	cmd.Dir = dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "PIP_CONFIG_FILE=/dev/null", "TMPDIR=" + dir}
	for _, name := range []string{"PYENV_ROOT", "PYENV_VERSION"} {
		if v := os.Getenv(name); v != "" {
			cmd.Env = append(cmd.Env, name+"="+v)
		}
	}
	if home, err := os.UserHomeDir(); err == nil && os.Getenv("PYENV_ROOT") == "" {
		cmd.Env = append(cmd.Env, "PYENV_ROOT="+filepath.Join(home, ".pyenv"))
	}
	out, err := cmd.CombinedOutput()
	installed = map[string]string{}
	infos, globErr := filepath.Glob(filepath.Join(target, "*.dist-info"))
	if globErr != nil {
		b.t.Fatal(globErr)
	}
	for _, i := range infos {
		name, version, _ := strings.Cut(strings.TrimSuffix(filepath.Base(i), ".dist-info"), "-")
		n, _ := normalise(name)
		installed[n] = version
	}
	return installed, string(out), err
}

func requirePip(t *testing.T) {
	t.Helper()
	require.Feature(t, "bin:python3")
	require.That(t, "pip", exec.Command("python3", "-m", "pip", "--version").Run())
}

func TestPipInstallsTheWorldOfADay(t *testing.T) {
	requirePip(t)
	x := newIndex(t, library()...)
	for _, htmlOnly := range []bool{false, true} {
		x.htmlOnly = htmlOnly
		b := newBed(t, x.upstream(), cache.Config{})
		world := policy.World{AsOf: date("2021-12-31")}
		if htmlOnly {
			world.Pin = []string{"pypi:app@1.0", "pypi:base-lib@1.0", "pypi:base-lib@1.1"}
		}
		b.set(world)
		got, out, err := b.pip("app")
		if err != nil || got["app"] != "1.0" || got["base-lib"] != "1.1" {
			t.Errorf("html %v: installed %v, %v\n%s", htmlOnly, got, err, out)
		}
		if htmlOnly {
			continue // pip reads both forms; what follows does not depend on it
		}
		if got, out, err := b.pip("base-lib==2.0"); err == nil || len(got) != 0 || !strings.Contains(out, "from versions: 1.0, 1.1") {
			t.Errorf("a later version: %v, %v\n%s", got, err, out)
		}
		before := x.artefacts.Load()
		if got, out, err := b.pip("app"); err != nil || got["base-lib"] != "1.1" || x.artefacts.Load() != before {
			t.Errorf("the second install asked upstream for %d artefacts: %v\n%s", x.artefacts.Load()-before, err, out)
		}
		if got, out, err := b.pip("--no-deps", b.web.URL+"/pypi/files/base-lib/base_lib-2.0-py3-none-any.whl"); err == nil || !strings.Contains(out, "403") {
			t.Errorf("the later file by its URL: %v, %v\n%s", got, err, out)
		}
	}
}

func TestPipWithHashesAndUpstreamsURLs(t *testing.T) {
	requirePip(t)
	x := newIndex(t, library()...)
	b := newBed(t, x.upstream(), cache.Config{})
	b.set(policy.World{AsOf: date("2021-12-31")})
	b.page("base-lib") // the page tells where the files lie
	lock := func(lines ...string) string {
		path := filepath.Join(t.TempDir(), "requirements.txt")
		if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	hash := map[string]string{}
	urls := map[string]string{}
	for _, rs := range x.projects {
		for _, r := range rs {
			hash[r.file], urls[r.file] = sha(r.body), x.url(r)
		}
	}
	const old, later = "base_lib-1.1-py3-none-any.whl", "base_lib-2.0-py3-none-any.whl"
	good := lock("app==1.0 --hash=sha256:"+hash["app-1.0-py3-none-any.whl"], "base-lib==1.1 --hash=sha256:"+hash[old])
	if got, out, err := b.pip("--require-hashes", "-r", good); err != nil || got["app"] != "1.0" || got["base-lib"] != "1.1" {
		t.Errorf("installed %v, %v\n%s", got, err, out)
	}
	bad := lock("base-lib==1.1 --hash=sha256:" + hash[later])
	if got, out, err := b.pip("--require-hashes", "-r", bad); err == nil || !strings.Contains(out, "DO NOT MATCH") {
		t.Errorf("wrong hash: %v, %v\n%s", got, err, out)
	}
	// A lock file's absolute URLs lead through the proxy to the mirror.
	if got, out, err := b.pip("--proxy", b.web.URL, "--require-hashes", "-r", lock("base-lib @ "+urls[old]+" --hash=sha256:"+hash[old])); err != nil || got["base-lib"] != "1.1" {
		t.Errorf("upstream's URL: %v, %v\n%s", got, err, out)
	}
	got, out, err := b.pip("--proxy", b.web.URL, "--require-hashes", "-r", lock("base-lib @ "+urls[later]+" --hash=sha256:"+hash[later]))
	if e := b.last(); err == nil || !strings.Contains(out, "403") || !e.Denied || e.Rule != "as_of 2021-12-31" || e.Version != "2.0" {
		t.Errorf("upstream's URL of a later version: %v, %v, event %+v\n%s", got, err, e, out)
	}
}

func TestPipEndsWhenUpstreamIsWrong(t *testing.T) {
	requirePip(t)
	bad := wheel("bad", "1.0", "2020-01-01")
	bad.corrupt = true
	bad.metadata = nil
	x := newIndex(t, bad)
	b := newBed(t, x.upstream(), cache.Config{})
	got, out, err := b.pip("bad")
	var exit *exec.ExitError
	if !errors.As(err, &exit) || len(got) != 0 {
		t.Errorf("wrong bytes: %v, %v\n%s", got, err, out)
	}
	x.dead.Store(true)
	if got, out, err := b.pip("other"); !errors.As(err, &exit) || len(got) != 0 || !strings.Contains(out, "No matching distribution") {
		t.Errorf("dead: %v, %v\n%s", got, err, out)
	}
}

// real is the upstream that this machine's pip uses, if it can be reached.
func real(t *testing.T) (upstream.Upstream, *upstream.Client) {
	t.Helper()
	all, err := upstream.Discover(t.Context(), upstream.Node{Env: os.Environ()}, nil)
	if err != nil {
		t.Fatal(err)
	}
	u := all[policy.PyPI]
	if len(u.URLs) == 0 {
		require.That(t, "net:pypi", errors.New(u.Missing))
	}
	client := upstream.NewClient(http.DefaultTransport, u)
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	resp, err := client.Get(t.Context(), u.URLs[0]+"/six/", http.Header{"Accept": {accept}})
	if err == nil {
		_, err = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			err = fmt.Errorf("it answers %d", resp.StatusCode)
		}
	}
	require.That(t, "net:pypi", err)
	return u, client
}

func TestPipAgreesWithTheDatesOfTheMachinesUpstream(t *testing.T) {
	requirePip(t)
	u, _ := real(t)
	b := newBed(t, u, cache.Config{})
	asOf := date("2020-01-10")
	dated := false
	want := map[string]version{}
	for _, name := range []string{"six", "python-dateutil"} {
		page, status := b.page(name)
		if status != http.StatusOK {
			t.Fatalf("page of %s: %d", name, status)
		}
		for _, f := range page.Files {
			at, err := time.Parse(time.RFC3339Nano, f.UploadTime)
			dated = dated || err == nil
			v := parseVersion(fileVersion(name, f.Filename, nil))
			if err == nil && !at.After(asOf) && strings.HasSuffix(f.Filename, ".whl") && !v.prerelease() && string(f.Yanked) == "false" && v.compare(want[name]) > 0 {
				want[name] = v
			}
		}
	}
	if !dated {
		t.Skip("the machine's upstream tells no dates")
	}
	b.set(policy.World{AsOf: asOf})
	start := time.Now()
	got, out, err := b.pip("python-dateutil")
	first := time.Since(start)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for name, v := range want {
		if got[name] != v.text {
			t.Errorf("%s: installed %s, and upstream's dates say %s", name, got[name], v.text)
		}
	}
	before := b.cache.Stats().UpstreamBytes
	start = time.Now()
	if _, out, err := b.pip("python-dateutil"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if n := b.cache.Stats().UpstreamBytes - before; n != 0 {
		t.Errorf("the second install took %d bytes from upstream", n)
	}
	t.Logf("as of %s: %v; first install %s, second %s", asOf.Format(time.DateOnly), got, first.Round(time.Millisecond), time.Since(start).Round(time.Millisecond))
	// The same file as a lock file has it: by upstream's own URL.
	b.set(policy.World{})
	page, _ := b.page("six")
	o, _, err := b.s.fetch(t.Context(), u.URLs[0]+"/six/", accept, maxPage)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = o.Close() }()
	raw, err := o.Bytes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	newest := slices.MaxFunc(page.Files, func(a, b wireFile) int { return strings.Compare(a.UploadTime, b.UploadTime) })
	last := newest.Filename
	m := regexp.MustCompile(`https?://([^/"]+)(/[^"]*/` + regexp.QuoteMeta(last) + `)"`).FindSubmatch(raw)
	if m == nil {
		t.Fatalf("upstream's page has no URL of %s", last)
	}
	path, ok := b.s.Match("https", string(m[1]), string(m[2]))
	if !ok {
		t.Fatalf("no place for %s", m[0])
	}
	b.set(policy.World{AsOf: asOf})
	if r := b.get("/pypi" + path); r.status != http.StatusForbidden || r.header.Get("Sandsea-Rule") != "as_of 2020-01-10" {
		t.Errorf("the newest file, %s, by upstream's URL: %d, %d bytes", last, r.status, len(r.body))
	}
}
