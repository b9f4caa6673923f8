package debian

import (
	"bytes"
	"path"
	"strings"
	"testing"
)

func FuzzParseRelease(f *testing.F) {
	text := "Suite: stable\nDate: Sat, 11 Jul 2026 10:16:37 UTC\nValid-Until: Sat, 18 Jul 2026 10:16:37 UTC\nSHA256:\n " + strings.Repeat("0a", 32) + " 7 main/Packages\n"
	f.Add([]byte(text))
	f.Add([]byte("-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA256\n\n" + text + "-----BEGIN PGP SIGNATURE-----\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := parseRelease(b)
		if err != nil {
			return
		}
		names := 0
		for sum, list := range r.bySum {
			if !isSHA256(sum) {
				t.Errorf("sum %q", sum)
			}
			names += len(list)
		}
		for name, f := range r.Files {
			if f.Size < 0 || !isSHA256(f.SHA256) {
				t.Errorf("file %q %+v", name, f)
			}
		}
		if names < len(r.Files) {
			t.Errorf("%d files, %d of them by sum", len(r.Files), names)
		}
	})
}

func FuzzParsePool(f *testing.F) {
	for _, seed := range []string{
		"pool/main/h/hello/hello_2.10-3_amd64.deb", "pool/main/h/hello/hello_2.10.orig.tar.gz", "pool/main/h/hello/hello_2.10-3.dsc",
		"pool/main/h/hello/hello_1%3a2.10-3+b1_amd64.udeb", "pool/updates/main/l/linux/linux_6.1.1.orig-x.tar.xz.asc", "pool/main/h/../../x_1_a.deb",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, p string) {
		file, err := parsePool(p)
		if err != nil {
			return
		}
		if path.Clean(p) != p || strings.Contains(p, "/../") {
			t.Errorf("%q leads upwards", p)
		}
		base := path.Base(p)
		if !strings.HasPrefix(base, file.Name+"_") || file.Version == "" || file.Arch == "" || strings.ContainsAny(file.Name+file.Source+file.Version, "/_%") {
			t.Errorf("%q is read as %+v", p, file)
		}
		file.sourceVersion()
	})
}

func FuzzParseIndex(f *testing.F) {
	f.Add([]byte("Package: hello\nFilename: pool/h/hello_1_all.deb\nSHA256: "+strings.Repeat("0a", 32)+"\n\nPackage: x\nDirectory: pool/x\nChecksums-Sha256:\n "+strings.Repeat("0b", 32)+" 7 x_1.dsc\n"), "main/binary-all/Packages")
	f.Add([]byte("\x1f\x8b"), "main/source/Sources.gz")
	f.Add([]byte("\xfd7zXZ\x00"), "main/source/Sources.xz")
	f.Fuzz(func(t *testing.T, b []byte, name string) {
		_ = parseIndex(bytes.NewReader(b), name, func(path, sum string) {
			if !isSHA256(sum) || path == "" {
				t.Errorf("%q has sum %q", path, sum)
			}
		})
	})
}
