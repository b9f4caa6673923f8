package journal

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
)

const childEnv = "SANDSEA_JOURNAL_CRASH_CHILD"

func TestMain(m *testing.M) {
	if dir := os.Getenv(childEnv); dir != "" {
		crashChild(dir)
	}
	os.Exit(m.Run())
}

// crashChild writes numbered records for ever, two and a deletion in each transaction step, and says each number after
// its Put returned.
func crashChild(dir string) {
	j, err := Open(dir, "crash")
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	next := 0
	for r, err := range j.All("n") {
		if err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		n, _ := strconv.Atoi(strings.TrimLeft(r.Key.Name, "0"))
		next = max(next, n+1)
	}
	for i := next; ; i++ {
		body := []byte(fmt.Sprintf("%d:%s", i, strings.Repeat("x", i%900)))
		err := j.PutAll(Record{Key{"n", fmt.Sprintf("%08d", i)}, body}, Record{Key{"last", "one"}, []byte(strconv.Itoa(i))})
		if err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		if _, err := fmt.Println("put", i); err != nil {
			os.Exit(1)
		}
	}
}

func TestNothingAcknowledgedIsLostUnderKillNine(t *testing.T) {
	const kills = 12
	dir := t.TempDir()
	acked, total := -1, 0
	for k := range kills {
		cmd := exec.Command(os.Args[0], "-test.run=^$")
		cmd.Env = append(os.Environ(), childEnv+"="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		timer := time.AfterFunc(time.Duration(30+rand.IntN(120))*time.Millisecond, func() { _ = cmd.Process.Kill() })
		first := k == 0 && timer.Stop() // that one lives until it has written, however long its start takes
		sc := bufio.NewScanner(out)
		for sc.Scan() {
			if first {
				first = false
				timer.Reset(time.Duration(1+rand.IntN(120)) * time.Millisecond)
			}
			word, n, _ := strings.Cut(sc.Text(), " ")
			if word != "put" {
				timer.Stop()
				_ = cmd.Process.Kill()
				_ = cmd.Wait()
				t.Fatalf("child: %s", sc.Text())
			}
			if acked, err = strconv.Atoi(n); err != nil {
				t.Fatal(err)
			}
		}
		timer.Stop()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()

		j, err := Open(dir, "crash")
		if err != nil {
			t.Fatalf("kill %d: %v", k, err)
		}
		count := 0
		for r, err := range j.All("n") {
			if err != nil {
				t.Fatalf("kill %d: %v", k, err)
			}
			want := fmt.Sprintf("%d:%s", count, strings.Repeat("x", count%900))
			if r.Key.Name != fmt.Sprintf("%08d", count) || string(r.Data) != want {
				t.Fatalf("kill %d: record %d is %s %.20q", k, count, r.Key.Name, r.Data)
			}
			count++
		}
		// One transaction may have been durable without its acknowledgement; none may be half.
		last, ok, err := j.Get(Key{"last", "one"})
		if count > 0 && (err != nil || !ok || string(last.Data) != strconv.Itoa(count-1)) {
			t.Fatalf("kill %d: the last transaction is half: %d records, last %s, %v", k, count, last.Data, err)
		}
		if count < acked+1 || count > acked+2 {
			t.Fatalf("kill %d: %d records, %d acknowledged", k, count, acked+1)
		}
		acked, total = count-1, count // what is durable stays so, said or not
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if total == 0 {
		t.Fatal("no child wrote anything before its kill")
	}
	t.Logf("%d kills, %d records, none lost", kills, total)
}
