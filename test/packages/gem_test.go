package packages

import (
	"archive/tar"
	"bytes"
	"crypto/md5" //nolint:gosec // the form of a gem server's index wants it
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"testing"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/testkit/server"
)

// makeGems is a program that makes the gems and their specifications.
const makeGems = `
require "rubygems/package"
require "zlib"
[%w[part 1.0.0], %w[part 1.5.0], %w[tool 1.0.0 part], %w[tool 2.0.0 part]].each do |name, version, needs|
  spec = Gem::Specification.new do |s|
    s.name, s.version, s.summary, s.authors, s.files = name, version, "test", ["test"], ["lib/#{name}.rb"]
    s.add_dependency needs if needs
  end
  Dir.mkdir "lib" unless Dir.exist? "lib"
  File.write "lib/#{name}.rb", "puts '#{name} #{version}'\n"
  Gem::Package.build spec, true
  File.binwrite "#{name}-#{version}.gemspec.rz", Zlib::Deflate.deflate(Marshal.dump(spec))
end
`

// gemDays are when the versions came, as the gem server tells.
var gemDays = map[string]string{"1.0.0": "2023-01-01", "1.5.0": "2025-01-01", "2.0.0": "2025-01-01"}

// fill lays out what a sandbox has made.
func (g *gems) fill(t testing.TB, b box) {
	t.Helper()
	var made bytes.Buffer
	if _, err := b.DownloadTar(within(t, callLimit), &sandseav1.DownloadTarRequest{Path: "/gems"}, &made); err != nil {
		t.Fatal(err)
	}
	files := map[string][]byte{}
	for r := tar.NewReader(&made); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		name := path.Base(h.Name)
		body, err := io.ReadAll(r)
		switch {
		case err != nil:
			t.Fatal(err)
		case strings.HasSuffix(name, ".gem"):
			files["/gems/"+name] = body
		case strings.HasSuffix(name, ".rz"):
			files["/quick/Marshal.4.8/"+name] = body
		}
	}
	all := "created_at: 2026-01-01T00:00:00Z\n---\n"
	for _, gem := range []struct{ name, needs, versions string }{{"part", "", "1.0.0,1.5.0"}, {"tool", "part:>= 0", "1.0.0,2.0.0"}} {
		info, dates := "---\n", ""
		for v := range strings.SplitSeq(gem.versions, ",") {
			body := files["/gems/"+gem.name+"-"+v+".gem"]
			if body == nil {
				t.Fatalf("no gem %s %s was made", gem.name, v)
			}
			info += fmt.Sprintf("%s %s|checksum:%x\n", v, gem.needs, sha256.Sum256(body))
			dates += fmt.Sprintf(`,{"number":%q,"platform":"ruby","created_at":"%sT00:00:00Z"}`, v, gemDays[v])
		}
		files["/info/"+gem.name] = []byte(info)
		files["/api/v1/versions/"+gem.name+".json"] = []byte("[" + dates[1:] + "]")
		all += fmt.Sprintf("%s %s %x\n", gem.name, gem.versions, md5.Sum([]byte(info))) //nolint:gosec // see above
	}
	files["/versions"] = []byte(all)
	g.files.Store(&files)
}

// gemInstalls needs Ruby, which a sandbox installs by apt.
func gemInstalls(t *testing.T, s *server.Server, g *gems) {
	t.Helper()
	registry(t, policy.Debian, "/dists/bookworm/InRelease")
	b := openOn(t, s, allow(policy.Debian, policy.RubyGems))
	b.sh(apt + "ruby")
	b.write("/gems/make.rb", makeGems)
	b.sh("cd /gems && ruby make.rb && ls *.gem")
	g.fill(t, b)

	install := func(home string) string {
		return "export GEM_HOME=" + home + " GEM_SPEC_CACHE=" + home + "/specs; gem install --no-document tool"
	}
	if out := b.sh(install("/tmp/first")); !strings.Contains(out, "tool-2.0.0") || !strings.Contains(out, "part-1.5.0") {
		t.Errorf("gem install: %s", out)
	}
	b.sh("GEM_HOME=/tmp/first ruby -e 'require \"tool\"' | grep 'tool 2.0.0'")
	asked := g.asked.Load()
	b.sh(install("/tmp/second"))
	if n := g.asked.Load(); n != asked {
		t.Errorf("the second install asked upstream for %d gems", n-asked)
	}
	if got := b.files(policy.RubyGems); len(got) != 4 || got[0].GetSource() != "upstream" || got[3].GetSource() != "cache" {
		t.Errorf("the flow log has %v", got)
	}

	// The same sandbox in another world.
	change := func(p *sandseav1.NetworkPolicy) {
		t.Helper()
		if _, err := b.SetPolicy(within(t, callLimit), p); err != nil {
			t.Fatal(err)
		}
	}
	change(asOf(allow(policy.RubyGems), day(t, "2024-01-01")))
	if out := b.sh(install("/tmp/third")); !strings.Contains(out, "tool-1.0.0") || !strings.Contains(out, "part-1.0.0") {
		t.Errorf("gem install as of a date: %s", out)
	}
	b.shortened(policy.RubyGems, "tool", "as_of 2024-01-01")
	b.refused(install("/tmp/fourth")+" -v 2.0.0", "tool", "2.0.0")
	b.refused("ruby -ropen-uri -e 'URI.open(\"http://100.64.0.1/rubygems/gems/tool-2.0.0.gem\")'", "403")
	b.denied(policy.RubyGems, "tool", "as_of 2024-01-01")

	p := allow(policy.RubyGems)
	p.Deny = []string{"rubygems:part"}
	change(p)
	b.refused(install("/tmp/fifth"), "part")
	b.denied(policy.RubyGems, "part", "deny rubygems:part")
}
