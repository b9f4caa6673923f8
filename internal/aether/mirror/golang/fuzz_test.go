package golang

import (
	"archive/zip"
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/mod/module"
	"golang.org/x/mod/semver"
)

func FuzzParsePath(f *testing.F) {
	for _, seed := range []string{
		"/code.test/!org/lib/@v/list", "/code.test/x/@latest", "/code.test/x/v2/@v/v2.0.0.info", "/code.test/x/@v/v1.0.0-!r!c.zip",
		"/gopkg.in/x.v1/@v/v1.0.0.mod", "/sumdb/sum.test/supported", "/sumdb/sum.test/lookup/code.test/!x/tile/y@v1.0.0",
		"/sumdb/sum.test/a/tile/8/0/x001/000.p/7", "/code.test/x/@v/master.info", "//@v/list", "/a.b/@v/../../x.info",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, path string) {
		r, err := parsePath(path)
		if err != nil {
			return
		}
		// What is accepted can be said again, and is then the same address.
		var again string
		switch r.endpoint {
		case list, latest:
			p, err := module.EscapePath(r.module)
			if err != nil {
				t.Fatal(err)
			}
			again = "/" + p + map[endpoint]string{list: "/@v/list", latest: "/@latest"}[r.endpoint]
		case info, goMod, archive:
			if r.endpoint != info && !r.canonical() {
				t.Fatalf("file of %q", r.version)
			}
			again = filePath(r.module, r.version, map[endpoint]string{info: ".info", goMod: ".mod", archive: ".zip"}[r.endpoint])
		default:
			again = "/sumdb/" + r.database + "/" + r.path
		}
		if again != path {
			t.Errorf("%q is read as %q", path, again)
		}
		if slices.Contains(strings.Split(path, "/"), "..") {
			t.Errorf("%q leads upwards", path)
		}
	})
}

func FuzzParseList(f *testing.F) {
	f.Add([]byte("v1.0.0\nv1.1.0 2024-01-01\n\nmaster\nv2.0.0\nv0.0.0-20240101000000-0123456789ab\nv1.0.0\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		versions, err := parseList(b, "code.test/x")
		if err != nil {
			return
		}
		if !slices.IsSortedFunc(versions, semver.Compare) {
			t.Errorf("%q is not in order", versions)
		}
		for _, v := range versions {
			if err := module.Check("code.test/x", v); err != nil {
				t.Error(err)
			}
		}
		if best := newest(versions); (best == "") != (len(versions) == 0) || best != "" && !slices.Contains(versions, best) {
			t.Errorf("newest of %q is %q", versions, best)
		}
	})
}

func FuzzParseInfo(f *testing.F) {
	f.Add([]byte(`{"Version":"v1.0.0","Time":"2024-01-01T00:00:00Z","Origin":{"URL":"https://code.test/x.git"}}`), "v1.0.0")
	f.Add([]byte(`{"Version":"v0.0.0-20240101000000-0123456789ab"}`), "main")
	f.Fuzz(func(t *testing.T, b []byte, version string) {
		r, err := parseInfo(b, version)
		if err != nil {
			return
		}
		if canonical(version) && r.Version != version || !canonical(r.Version) {
			t.Errorf("asked for %q, got %q", version, r.Version)
		}
		if at := r.published(); module.IsPseudoVersion(r.Version) && at.Before(commitTime(r.Version)) {
			t.Errorf("%s is of %s", r.Version, at)
		}
		r.repository()
	})
}

func FuzzParseLookup(f *testing.F) {
	f.Add([]byte("1\ncode.test/x v1.0.0 h1:abc=\ncode.test/x v1.0.0/go.mod h1:def=\n\ngo.sum database tree\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := parseLookup(b, "code.test/x", "v1.0.0")
		if err == nil && (!strings.HasPrefix(h, "h1:") || !bytes.Contains(b, []byte("code.test/x")) || !bytes.Contains(b, []byte(h))) {
			t.Errorf("found %q", h)
		}
	})
}

func FuzzHashZip(f *testing.F) {
	f.Add([]byte("PK\x05\x06\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if h, err := hashZip(bytes.NewReader(b), int64(len(b)), "code.test/x", "v1.0.0"); err == nil && h == "" {
			t.Error("no hash")
		}
	})
}

func TestADirectoryOfMillionsIsNotRead(t *testing.T) {
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	const root = "code.test/a@v1.0.0/"
	name := strings.Repeat("x", 4000)
	for i := range maxDirectory/len(name) + 1 {
		if _, err := z.CreateRaw(&zip.FileHeader{Name: fmt.Sprint(root, name, i), Method: zip.Store}); err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := hashZip(bytes.NewReader(b.Bytes()), int64(b.Len()), "code.test/a", "v1.0.0"); err == nil || !strings.Contains(err.Error(), "directory") {
		t.Errorf("got %v", err)
	}
}
