package segment

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

const crashMost = 6000

// writeUntilKilled is the child of TestNoAcknowledgedRecordIsLost: it says where it begins, then every number.
func writeUntilKilled(dir string) {
	p, err := NewPool(4)
	if err != nil {
		fmt.Println("failed:", err)
		os.Exit(1)
	}
	l, err := p.Open(Config{Dir: dir})
	if err != nil || l.Damaged() > 0 {
		fmt.Println("failed:", err, l.Damaged())
		os.Exit(1)
	}
	fmt.Println("from", l.Next())
	out := make([]byte, 0, 32)
	for {
		next := l.Next()
		if _, err := l.Append(content(next, size(next, crashMost))); err != nil {
			fmt.Println("failed:", err)
			os.Exit(1)
		}
		if next%700 == 0 {
			l.Seal()
		}
		out = append(strconv.AppendInt(out[:0], next, 10), '\n')
		os.Stdout.Write(out)
	}
}

func TestNoAcknowledgedRecordIsLost(t *testing.T) {
	kills := 25
	if testing.Short() {
		kills = 5
	}
	if n, err := strconv.Atoi(os.Getenv("SEGMENT_TEST_KILLS")); err == nil {
		kills = n
	}
	dir := filepath.Join(t.TempDir(), "log")
	r := rand.New(rand.NewPCG(5, 6))
	acked := int64(-1)
	for range kills {
		cmd := exec.CommandContext(t.Context(), os.Args[0])
		cmd.Env = append(os.Environ(), "SEGMENT_TEST_WRITER="+dir)
		pipe, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		// Killed after so many records, at some point of the next ones: a pipe holds some thousand of them.
		lines := bufio.NewScanner(pipe)
		begin, left := false, r.IntN(3000)
		for lines.Scan() {
			word, rest, _ := strings.Cut(lines.Text(), " ")
			n, err := strconv.ParseInt(rest+strings.TrimPrefix(word, "from"), 10, 64)
			switch {
			case err != nil:
				t.Fatal(lines.Text())
			case !begin && n <= acked:
				t.Fatalf("begins at %d, %d was acknowledged", n, acked)
			case !begin:
				begin = true
			default:
				acked = n
			}
			if left--; left == 0 {
				if err := cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
			}
		}
		if left > 0 {
			_ = cmd.Process.Kill()
		}
		_ = cmd.Wait()
	}
	seqs, errs := readAll(t, dir, 0, crashMost)
	if len(errs) > 0 || int64(len(seqs)) <= acked || seqs[len(seqs)-1] != int64(len(seqs)-1) {
		t.Fatalf("%d records were read, the last that was acknowledged is %d; %v", len(seqs), acked, errs)
	}
	t.Logf("%d kills, %d records acknowledged, %d read, %d segments", kills, acked+1, len(seqs), len(files(t, dir, "")))
}
