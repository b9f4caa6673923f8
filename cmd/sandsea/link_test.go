package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/testkit/testserver"
)

// mistaken shows a session of the sandbox that is its argument, and panics when it reads a "!".
func mistaken() {
	a := &app{io: ui.Stdio(os.Getenv), now: time.Now}
	a.io.In = alarm{os.Stdin}
	c, err := a.client()
	if err != nil {
		panic(err)
	}
	out, err := a.interact(context.Background(), c.Sandbox(os.Args[1]), &sandseav1.StartRequest{
		Command: client.Shell(`printf '\033[?1049h\033[?25l'; echo ready; exec sleep 1000`), Key: newKey(),
	}, 0)
	fmt.Println("not reached", out, err)
}

type alarm struct{ io.Reader }

func (a alarm) Read(b []byte) (int, error) {
	n, err := a.Reader.Read(b)
	if strings.Contains(string(b[:n]), "!") {
		panic("a mistake of ours")
	}
	return n, err
}

func TestAPanicGivesTheTerminalBack(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	x := programOnTerminal(t, 80, against(s), "sandsea-mistaken", living(t, s))
	x.untilShown("ready")
	x.types("!")
	if code, text := x.exits(); code != 2 || !strings.Contains(text, "panic: a mistake of ours") {
		t.Errorf("exit %d, %q", code, text)
	}
	x.wasGivenBack()
}

// deserted is a network on which nobody listens.
type deserted struct{}

func (deserted) RoundTrip(*http.Request) (*http.Response, error) {
	return nil, &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
}

func TestALinkThatStaysAwayIsGivenUpAfterItsLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, err := client.New(client.Config{URL: "http://127.0.0.1:1", Token: "t", HTTP: &http.Client{Transport: deserted{}}})
		if err != nil {
			t.Fatal(err)
		}
		var said strings.Builder
		a := &app{io: &ui.IO{Out: io.Discard, Err: &said}, now: time.Now}
		s := &session{a: a, sb: c.Sandbox("s7q3k2m5w4xn6d2hr5tcabqe8vk"), out: &outcome{}}
		broken := errdefs.New(errdefs.Unavailable, "", "the line broke")
		began := time.Now()
		err = a.passAll(t.Context(), s.sb, s.out, func(yield func(*sandseav1.ProcessEvent, error) bool) {
			started := &sandseav1.ProcessEvent_Started{Started: &sandseav1.Process{Number: 4}}
			_ = yield(&sandseav1.ProcessEvent{Event: started}, nil) && yield(nil, broken)
		}, func(int64) {})
		if took := time.Since(began); took <= linkLimit || took > linkLimit+time.Second {
			t.Errorf("given up after %s", took)
		}
		if got := said.String(); got != "sandsea: link lost, trying again, limit 60 s\n" {
			t.Errorf("it said %q", got)
		}
		err = s.ended(t.Context(), err)
		want := "link lost for 60 s; process 4 goes on in s7q3k2m5 as long as its sandbox does. " +
			"Come back: sandsea exec --attach 4 s7q3k2m5"
		if !errors.Is(err, errdefs.Unavailable) || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	})
}
