package maven

import (
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func FuzzParsePath(f *testing.F) {
	for _, seed := range []string{
		"/org/x/art/1.0/art-1.0.jar", "/org/x/art/1.0/art-1.0-sources.jar.sha1", "/org/x/art/maven-metadata.xml.md5", "/org/x/maven-metadata.xml",
		"/org/x/art/1-SNAPSHOT/art-1-20240101.000000-1.pom", "/org/x/art/1-SNAPSHOT/maven-metadata.xml", "/a/b/../c/d",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, p string) {
		pl, err := parsePath(p)
		if err != nil {
			return
		}
		if again := "/" + pl.path; path.Clean(p) != p || again != p && again+"."+pl.checksum != p {
			t.Errorf("%q is read as %q", p, again)
		}
		dir := "/" + pl.dir() + "/"
		if !strings.HasPrefix(p, dir) && !pl.metadata || pl.artifact == "" || pl.version == "" && !pl.metadata {
			t.Errorf("%q is read as %+v", p, pl)
		}
	})
}

func FuzzParseMetadata(f *testing.F) {
	f.Add([]byte(`<?xml version="1.0"?><metadata modelVersion="1.1.0"><groupId>g</groupId><artifactId>a</artifactId><versioning><latest>2</latest>` +
		`<release>2</release><versions><version>1</version><version>2</version></versions><lastUpdated>20240101000000</lastUpdated></versioning>` +
		`<plugins><plugin><prefix>p</prefix><artifactId>a</artifactId></plugin></plugins></metadata>`))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := parseMetadata(b)
		if err != nil {
			return
		}
		text, err := m.encode()
		if err != nil {
			t.Fatal(err)
		}
		again, err := parseMetadata(text)
		if err != nil {
			t.Fatalf("%v: %q", err, text)
		}
		if m.Versioning == nil {
			return
		}
		if diff := cmp.Diff(m.Versioning.Versions, again.Versioning.Versions); diff != "" {
			t.Error(diff)
		}
		until := time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)
		m.keep(func(v string) bool { return len(v)%2 == 0 }, until)
		v := m.Versioning
		if v.Latest != "" && !slices.Contains(v.Versions, v.Latest) || v.Release != "" && !slices.Contains(v.Versions, v.Release) || m.updated().After(until) {
			t.Errorf("kept %+v", v)
		}
	})
}
