// Command inside is the server inside a sandbox that the tests of endpoints talk to: one of each kind of traffic. It
// listens on the addresses that it is given, in HTTP/1.1 and in HTTP/2 without TLS, and says "ready" when it does.
package main

import (
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"time"
)

func main() {
	http.HandleFunc("/", tell)
	http.HandleFunc("/echo", echo)
	http.HandleFunc("/digest", digest)
	http.HandleFunc("/events", events)
	http.HandleFunc("/upgrade", upgrade)
	http.HandleFunc("/rpc.Test/", rpc)
	var p http.Protocols
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	s := &http.Server{Protocols: &p}
	failed := make(chan error)
	for _, address := range os.Args[1:] {
		l, err := net.Listen("tcp", address)
		if err != nil {
			fail(err)
		}
		go func() { failed <- s.Serve(l) }()
	}
	fmt.Println("ready")
	fail(<-failed)
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// tell says what the request looks like from inside.
func tell(w http.ResponseWriter, r *http.Request) {
	fmt.Fprintf(w, "%s %s %s\n", r.Proto, r.Method, r.RequestURI)
	_ = r.Header.Write(w)
}

// echo sends the body back while it comes.
func echo(w http.ResponseWriter, r *http.Request) {
	_ = http.NewResponseController(w).EnableFullDuplex()
	_, _ = io.CopyBuffer(struct{ io.Writer }{w}, r.Body, make([]byte, 256<<10))
}

// digest tells the size and the SHA-256 of a body, as a trailer too.
func digest(w http.ResponseWriter, r *http.Request) {
	h := sha256.New()
	n, err := io.Copy(h, r.Body)
	w.Header().Set("Trailer", "X-Digest")
	fmt.Fprintf(w, "%d %x %v", n, h.Sum(nil), err)
	w.Header().Set("X-Digest", fmt.Sprintf("%x", h.Sum(nil)))
}

// events sends one at once, and one more after so many milliseconds.
func events(w http.ResponseWriter, r *http.Request) {
	pause, err := strconv.Atoi(r.URL.Query().Get("pause_ms"))
	if err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	for _, word := range []string{"first", "second"} {
		fmt.Fprintf(w, "data: %s\n\n", word)
		_ = http.NewResponseController(w).Flush()
		select {
		case <-time.After(time.Duration(pause) * time.Millisecond):
		case <-r.Context().Done():
			return
		}
	}
}

// upgrade makes a line of the connection that sends everything back, and says bye when its reader has ended.
func upgrade(w http.ResponseWriter, _ *http.Request) {
	c, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		w.WriteHeader(http.StatusUpgradeRequired)
		return
	}
	defer c.Close()
	fmt.Fprint(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
	_, _ = io.Copy(c, rw)
	fmt.Fprint(c, "bye")
}

// rpc answers as servers of gRPC do: a status in the trailers, or in headers alone.
func rpc(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/grpc")
	w.Header().Set("X-Proto", r.Proto)
	if r.URL.Path == "/rpc.Test/Fail" {
		w.Header().Set("Grpc-Status", "5")
		return
	}
	buf := make([]byte, 64)
	for {
		n, err := r.Body.Read(buf)
		_, _ = w.Write(buf[:n])
		_ = http.NewResponseController(w).Flush()
		if err != nil {
			break
		}
	}
	w.Header().Set(http.TrailerPrefix+"Grpc-Status", "0")
}
