package rubygems

import (
	"bytes"
	"strings"
	"testing"
)

func FuzzParseInfo(f *testing.F) {
	f.Add([]byte("---\n1.0.0 dep:>= 1&< 2|checksum:" + strings.Repeat("0a", 32) + ",ruby:>= 2\n1.0.0-java |checksum:" + strings.Repeat("0b", 32) + "\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		all, err := parseInfo(b, "x")
		if err != nil {
			return
		}
		for _, g := range all {
			if !isVersion(g.Version) || g.Sum != "" && !isSHA256(g.Sum) || bytes.ContainsAny(g.line, "\n") || !bytes.Contains(b, g.line) {
				t.Errorf("gem %+v", g)
			}
		}
	})
}

func FuzzRewriteVersions(f *testing.F) {
	f.Add([]byte("created_at: x\n---\nrack 1.0.0,-2.0.0 0123\nother 1 45\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var out bytes.Buffer
		err := rewriteVersions(&out, bytes.NewReader(b), func(name, versions, sum string) string {
			if name == "rack" {
				return ""
			}
			return name + " " + versions + " " + sum
		})
		if err != nil {
			return
		}
		_, body, _ := strings.Cut("\n"+out.String(), "\n"+head)
		if strings.Contains("\n"+body, "\nrack ") {
			t.Errorf("a gem that was left out shows in %q", out.String())
		}
	})
}

func FuzzSplits(f *testing.F) {
	f.Add("rack-1.0.0-java")
	f.Add("a-1-2.0")
	f.Fuzz(func(t *testing.T, full string) {
		for _, s := range splits(full) {
			if s[0]+"-"+s[1] != full || strings.ContainsAny(full, "/\\%?#") {
				t.Errorf("%q is split into %q", full, s)
			}
		}
	})
}

func FuzzParseDates(f *testing.F) {
	f.Add([]byte(`[{"number":"1.0","platform":"java","created_at":"2024-01-01T00:00:00Z"}]`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if d, err := parseDates(b); err != nil && d != nil {
			t.Errorf("dates %v and %v", d, err)
		}
	})
}
