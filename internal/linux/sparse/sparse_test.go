package sparse

import (
	"os"
	"path/filepath"
	"testing"
)

// zerosAreData is what recording rests on: only what was punched or passed over is a hole.
func TestWrittenZerosAreDataAndOnlyPunchedOrPassedOverRangesAreHoles(t *testing.T) {
	f, err := os.OpenFile(filepath.Join(t.TempDir(), "f"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fd := int(f.Fd())
	const mib = 1 << 20
	if _, err := f.Write(make([]byte, 3*mib)); err != nil {
		t.Fatal(err)
	}
	check := func(when string, off, data int64, isData bool, hole int64) {
		t.Helper()
		d, ok, err := NextData(fd, off)
		if err != nil || ok != isData || (ok && d != data) {
			t.Errorf("%s: NextData(%d) = %d, %v, %v; want %d, %v", when, off, d, ok, err, data, isData)
		}
		h, ok, err := NextHole(fd, off)
		if err != nil || !ok || h != hole {
			t.Errorf("%s: NextHole(%d) = %d, %v, %v; want %d", when, off, h, ok, err, hole)
		}
	}
	check("zeros written", 0, 0, true, 3*mib)
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	check("zeros on disk", 0, 0, true, 3*mib)
	if err := Punch(fd, mib, mib); err != nil {
		t.Fatal(err)
	}
	check("punched", 0, 0, true, mib)
	check("punched", mib, 2*mib, true, mib)
	if err := f.Truncate(5*mib + 100); err != nil {
		t.Fatal(err)
	}
	check("lengthened", 2*mib, 2*mib, true, 3*mib)
	check("lengthened", 4*mib, 0, false, 4*mib)
	if _, ok, err := NextHole(fd, 5*mib+100); ok || err != nil {
		t.Errorf("NextHole at the end: %v, %v", ok, err)
	}
	if n, err := Allocated(fd); err != nil || n < 2*mib || n > 2*mib+64<<10 {
		t.Errorf("allocated %d, %v", n, err)
	}
	if b, err := Block(fd); err != nil || b < 4096 {
		t.Errorf("block %d, %v", b, err)
	}
}
