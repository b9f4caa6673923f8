package files

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"testing"
)

func BenchmarkOpen(b *testing.B) {
	s := newScratch(b, "")
	s.put("tmp/a", "x", 0o644, 1000)
	v := s.user()
	for b.Loop() {
		f, _, err := v.Open(b.Context(), "/tmp/a")
		must(b, err)
		_ = f.Close()
	}
}

func BenchmarkStat(b *testing.B) {
	s := newScratch(b, "")
	v := s.user()
	for b.Loop() {
		_, err := v.Stat(b.Context(), "/tmp", false)
		must(b, err)
	}
}

func BenchmarkLookupUser(b *testing.B) {
	s := newScratch(b, "")
	s.put("etc/passwd", passwd, 0o644, 0)
	s.put("etc/group", group, 0o644, 0)
	for b.Loop() {
		_, err := s.LookupUser(b.Context(), "agent")
		must(b, err)
	}
}

func BenchmarkWriteSmall(b *testing.B) {
	s := newScratch(b, "")
	v := s.user()
	content := make([]byte, 1000)
	for i := 0; b.Loop(); i++ {
		_, err := v.Write(b.Context(), fmt.Sprint("/tmp/", i%100), 0, nil, bytes.NewReader(content))
		must(b, err)
	}
}

func BenchmarkWriteBig(b *testing.B) {
	s := newScratch(b, "")
	const size = 64 << 20
	b.SetBytes(size)
	for b.Loop() {
		_, err := s.user().Write(b.Context(), "/tmp/big", 0, nil, io.LimitReader(zeros{}, size))
		must(b, err)
	}
}

func BenchmarkUploadTarOf1000(b *testing.B) {
	s := newScratch(b, "")
	var entries []entry
	for i := range 1000 {
		entries = append(entries, entry{
			Header:  tar.Header{Name: fmt.Sprintf("%d/%d", i%20, i), Typeflag: tar.TypeReg, Mode: 0o644},
			content: "some content",
		})
	}
	up := archive(b, entries...).Bytes()
	for i := 0; b.Loop(); i++ {
		_, err := s.user().UploadTar(b.Context(), fmt.Sprint("/tmp/", i), bytes.NewReader(up))
		must(b, err)
	}
}

func BenchmarkDownloadTarOf1000(b *testing.B) {
	s := newScratch(b, "")
	for i := range 1000 {
		write(b, s.user(), fmt.Sprintf("/tmp/t/%d/%d", i%20, i), "some content")
	}
	for b.Loop() {
		_, err := s.user().DownloadTar(b.Context(), "/tmp/t", io.Discard)
		must(b, err)
	}
}
