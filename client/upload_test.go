package client_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
)

// TestACancelledUploadNeverLooksWhole reads, at the server's side, the bodies of uploads that their callers give up: each
// must break off, none may end in good order.
func TestACancelledUploadNeverLooksWhole(t *testing.T) {
	ends := make(chan error, 1)
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, err := io.Copy(io.Discard, r.Body)
		ends <- err
	}))
	defer srv.Close()
	c, err := client.New(client.Config{URL: srv.URL, Token: "t"})
	if err != nil {
		t.Fatal(err)
	}
	for range 50 {
		ctx, cancel := context.WithCancelCause(t.Context())
		given := 0
		_, err := c.Sandbox("s").WriteFile(ctx, &sandseav1.WriteFileHeader{Path: "/f"}, reader(func(p []byte) (int, error) {
			if given += len(p); given > 1<<20 {
				cancel(errors.New("changed my mind"))
			}
			return len(p), nil
		}))
		if err == nil {
			t.Fatal("a cancelled upload succeeded")
		}
		select {
		case err := <-ends:
			if err == nil {
				t.Fatal("the server saw a whole body")
			}
		case <-time.After(limit):
			t.Fatal("the upload did not end")
		}
	}
}

type reader func([]byte) (int, error)

func (r reader) Read(p []byte) (int, error) { return r(p) }

// TestAnUploadGivenUpLeavesNoCall wants net/http to be done with a call whose caller had nothing more to send.
func TestAnUploadGivenUpLeavesNoCall(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // it breaks off
	}))
	defer srv.Close()
	over := make(chan struct{})
	c, err := client.New(client.Config{URL: srv.URL, Token: "t", HTTP: &http.Client{
		Transport: tripper(func(r *http.Request) (*http.Response, error) {
			defer close(over)
			return client.Transport().RoundTrip(r)
		}),
	}})
	if err != nil {
		t.Fatal(err)
	}
	broken, given := errors.New("the disk is gone"), false
	_, err = c.Sandbox("s").WriteFile(t.Context(), &sandseav1.WriteFileHeader{Path: "/f"}, reader(func(p []byte) (int, error) {
		if given {
			return 0, broken
		}
		given = true
		return len(p), nil
	}))
	if !errors.Is(err, broken) {
		t.Fatalf("%v, want %v", err, broken)
	}
	select {
	case <-over:
	case <-time.After(limit):
		t.Fatal("the call goes on")
	}
}

type tripper func(*http.Request) (*http.Response, error)

func (f tripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// reading is a transport that reads a request's body to its end and says how it ended.
type reading struct{ ended chan error }

func (r reading) RoundTrip(req *http.Request) (*http.Response, error) {
	_, err := io.Copy(io.Discard, req.Body)
	r.ended <- err
	return nil, errors.New("no answer")
}

// TestHalfAnUploadIsNoWholeOneOverAnyTransport has a source fail while a transport of the caller's own reads.
func TestHalfAnUploadIsNoWholeOneOverAnyTransport(t *testing.T) {
	tr := reading{make(chan error, 1)}
	c, err := client.New(client.Config{URL: "http://127.0.0.1:1", Token: "t", HTTP: &http.Client{Transport: tr}})
	if err != nil {
		t.Fatal(err)
	}
	broken := errors.New("disk full")
	if _, err := c.Sandbox("s").WriteFile(t.Context(), &sandseav1.WriteFileHeader{Path: "/half"}, failing{broken}); !errors.Is(err, broken) {
		t.Errorf("a reader that fails: %v", err)
	}
	if err := <-tr.ended; !errors.Is(err, broken) {
		t.Errorf("the body ended with %v, as a whole one does", err)
	}
}
