package rubygems_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandsea/sandsea/internal/aether/mirror/rubygems"
	"github.com/sandsea/sandsea/internal/aether/mirror/source/sourcetest"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/policy"
)

// build makes a gem and its specification as gem servers have it, with the programs themselves.
func build(t *testing.T, up *sourcetest.Upstream, name, version, depends string) (line string) {
	t.Helper()
	dir := t.TempDir()
	script := fmt.Sprintf(`require "rubygems/package"; require "zlib"
spec = Gem::Specification.new do |s|
  s.name, s.version, s.summary, s.authors, s.files = %q, %q, "test", ["test"], []
  s.add_dependency %q if %q != ""
end
Gem::Package.build(spec, true)
File.binwrite("spec.rz", Zlib::Deflate.deflate(Marshal.dump(spec)))
`, name, version, depends, depends)
	if out, err := sourcetest.Run(t, dir, nil, "ruby", "-e", script); err != nil {
		t.Fatalf("build %s: %v: %s", name, err, out)
	}
	full := name + "-" + version
	read := func(file string) string {
		b, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	body := read(full + ".gem")
	up.Put("/gems/"+full+".gem", body)
	up.Put("/quick/Marshal.4.8/"+full+".gemspec.rz", read("spec.rz"))
	if depends != "" {
		depends += ":>= 0"
	}
	return version + " " + depends + "|checksum:" + sha(body) + "\n"
}

// gem and bundle themselves, against a gem server of this test.
func TestGemAndBundler(t *testing.T) {
	for _, p := range []string{"ruby", "gem"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("no %s on this machine", p)
		}
	}
	up := sourcetest.NewUpstream(t)
	tool := "---\n" + build(t, up, "tool", "1.0.0", "part") + build(t, up, "tool", "2.0.0", "part")
	part := "---\n" + build(t, up, "part", "1.0.0", "") + build(t, up, "part", "1.5.0", "")
	up.Put("/info/tool", tool)
	up.Put("/info/part", part)
	up.Put("/versions", "created_at: 2026-01-01T00:00:00Z\n---\npart 1.0.0,1.5.0 "+md5Of(part)+"\ntool 1.0.0,2.0.0 "+md5Of(tool)+"\n")
	for name, later := range map[string]string{"tool": "2.0.0", "part": "1.5.0"} {
		up.Put("/api/v1/versions/"+name+".json", `[{"number":"`+later+`","platform":"ruby","created_at":"2025-01-01T00:00:00Z"},`+
			`{"number":"1.0.0","platform":"ruby","created_at":"2023-01-01T00:00:00Z"}]`)
	}
	u := upstream.Upstream{URLs: []string{up.URL}}
	m := sourcetest.Serve(t, rubygems.New(sourcetest.NewSource(t, u), u), policy.World{})

	root := t.TempDir()
	m.Guest(policy.RubyGems, root)
	run := func(name string, args ...string) (string, error) {
		t.Helper()
		home := t.TempDir()
		return sourcetest.Run(t, root, []string{
			"HOME=" + home, "GEM_HOME=" + filepath.Join(home, "gems"), "GEM_SPEC_CACHE=" + filepath.Join(home, "specs"),
			"GEMRC=" + filepath.Join(root, "etc/gemrc"), "BUNDLE_MIRROR__ALL=" + m.URL + "/", "BUNDLE_PATH=" + filepath.Join(home, "bundle"),
		}, name, args...)
	}
	install := func(args ...string) (string, error) {
		return run("gem", append([]string{"install", "--no-document"}, args...)...)
	}
	expect := func(what string, out string, err error, fine bool, words ...string) {
		t.Helper()
		bad := (err == nil) != fine
		for _, w := range words {
			bad = bad || !strings.Contains(out, w)
		}
		if bad {
			t.Errorf("%s: %v: %s\n%+v", what, err, out, m.Events())
		}
	}

	out, err := install("tool")
	expect("today", out, err, true, "Successfully installed tool-2.0.0", "Successfully installed part-1.5.0")
	m.In(policy.World{AsOf: sourcetest.Day("2024-01-01")})
	out, err = install("tool")
	expect("a date", out, err, true, "Successfully installed tool-1.0.0", "Successfully installed part-1.0.0")
	out, err = install("tool", "-v", "2.0.0")
	expect("a later version", out, err, false)
	m.In(policy.World{Deny: []string{"rubygems:part"}})
	out, err = install("tool")
	expect("a denied gem", out, err, false)

	if _, err := exec.LookPath("bundle"); err != nil {
		t.Skip("no bundle on this machine: gem passed")
	}
	if err := os.WriteFile(filepath.Join(root, "Gemfile"), []byte("source \"https://gems.test\"\ngem \"tool\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	bundle := func() (string, error) {
		_ = os.Remove(filepath.Join(root, "Gemfile.lock"))
		return run("bundle", "install", "--retry", "0")
	}
	m.In(policy.World{})
	out, err = bundle()
	expect("bundle today", out, err, true, "tool 2.0.0", "part 1.5.0")
	m.In(policy.World{AsOf: sourcetest.Day("2024-01-01")})
	out, err = bundle()
	expect("bundle with a date", out, err, true, "tool 1.0.0", "part 1.0.0")
	m.In(policy.World{Deny: []string{"rubygems:part@1.5.0"}})
	out, err = bundle()
	expect("bundle with a denied version", out, err, true, "tool 2.0.0", "part 1.0.0")
}
