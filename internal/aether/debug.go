package aether

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/pprof"
	"os"
	"runtime"
	"time"
)

// listenDebug opens the door for profiles and metrics, for root alone:
//
//	curl --unix-socket DIR/run/aether-debug.sock http://x/metrics
func listenDebug(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return nil, fmt.Errorf("aether: %w", err)
	}
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("aether: %w", err)
	}
	ln.SetUnlinkOnClose(false)                    // the directory is root's: the next one replaces it
	if err := os.Chmod(path, 0o600); err != nil { // DIR/run itself is closed to all but root
		_ = ln.Close()
		return nil, fmt.Errorf("aether: %w", err)
	}
	return ln, nil
}

// serveDebug serves them until the listener is closed.
func serveDebug(ln net.Listener, p *process) error {
	mux := http.NewServeMux()
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("/metrics", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; version=0.0.4")
		p.metrics(w)
	})
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	err := srv.Serve(ln)
	_ = srv.Close()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return fmt.Errorf("aether: serve profiles: %w", err)
}

// metrics writes what Prometheus reads.
func (p *process) metrics(w io.Writer) {
	t, l := p.roster.Totals(), p.flows.Stats()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	for _, v := range []struct {
		name, kind, help string
		value            int64
	}{
		{"sandboxes", "gauge", "Sandboxes that are known.", t.Sandboxes},
		{"flows", "gauge", "Connections open now.", t.Flows},
		{"flows_total", "counter", "Connections opened.", t.Opened},
		{"denied_total", "counter", "Questions, connections and artefacts denied.", t.Denied},
		{"sent_bytes_total", "counter", "Bytes from sandboxes.", t.Sent},
		{"received_bytes_total", "counter", "Bytes to sandboxes.", t.Received},
		{"flow_log_lost_events_total", "counter", "Events that could not be written.", l.Lost},
		{"goroutines", "gauge", "Goroutines.", int64(runtime.NumGoroutine())},
		{"memory_bytes", "gauge", "Memory held by the runtime.", int64(m.Sys - m.HeapReleased)},
	} {
		fmt.Fprintf(w, "# HELP sandsea_aether_%s %s\n# TYPE sandsea_aether_%[1]s %[3]s\nsandsea_aether_%[1]s %[4]d\n", v.name, v.help, v.kind, v.value)
	}
}
