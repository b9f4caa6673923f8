package crates

import (
	"bytes"
	"strings"
	"testing"
)

func FuzzParseIndex(f *testing.F) {
	sum := strings.Repeat("0a", 32)
	f.Add([]byte(`{"name":"abcd","vers":"1.0.0","cksum":"` + sum + `","pubtime":"2024-01-01T00:00:00Z"}` + "\n\n" + `{"name":"ABCD","vers":"1.0.1+x","cksum":"` + sum + `"}`))
	f.Add([]byte(`{"name":"abcd","vers":"1.0.0/..","cksum":"` + sum + `"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		all, err := parseIndex(b, "abcd")
		if err != nil {
			return
		}
		for _, r := range all {
			if !strings.EqualFold(r.Name, "abcd") || !isVersion(r.Version) || !isSHA256(r.Sum) || strings.ContainsAny(r.Version, "/\\%?#") {
				t.Errorf("release %+v", r)
			}
			if bytes.ContainsAny(r.line, "\n") || !bytes.Contains(b, r.line) {
				t.Errorf("line %q", r.line)
			}
			u := registry{Download: "https://files.test/{prefix}/{crate}/{version}"}.crateURL(r)
			if strings.Contains(u, "..") && !strings.Contains(r.Version, "..") || strings.Count(u, "/") != 6 {
				t.Errorf("address %q", u)
			}
		}
	})
}

func FuzzParseRegistry(f *testing.F) {
	f.Add([]byte(`{"dl":"https://files.test/dl","api":"https://files.test"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := parseRegistry(b); err == nil && !strings.HasPrefix(r.Download, "http") {
			t.Errorf("dl %q", r.Download)
		}
	})
}

func FuzzParseDownload(f *testing.F) {
	f.Add("/serde/1.0.0/download")
	f.Fuzz(func(t *testing.T, path string) {
		if name, version, ok := parseDownload(path); ok && downloadPath(name, version) != "/crates"+path {
			t.Errorf("%q is read as %q %q", path, name, version)
		}
	})
}
