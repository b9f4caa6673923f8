package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/sandsea/sandsea/internal/edge/nodeapi"
)

// serveDebug serves Go's profiles on DIR/run/debug.sock, for root alone:
//
//	curl --unix-socket DIR/run/debug.sock 'http://x/debug/pprof/profile?seconds=5' > cpu.pprof
func serveDebug(dir *dataDir, log *slog.Logger) (stop func() error, err error) {
	mux := http.NewServeMux()
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	l, err := nodeapi.ListenUnix(dir.join("run", "debug.sock"))
	if err != nil {
		return nil, fmt.Errorf("open the door for profiles: %w", err)
	}
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.Error("serve profiles", "err", err)
		}
	}()
	return func() error {
		err := srv.Close()
		<-done
		return err
	}, nil
}
