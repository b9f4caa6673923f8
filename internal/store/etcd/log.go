package etcd

import (
	"context"
	"log/slog"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// zapTo is a zap logger that writes into log. What etcd calls a warning is its own business most of the time (a slow
// apply, a retried dial), so that warnings become debug messages and errors become warnings.
func zapTo(log *slog.Logger) *zap.Logger {
	if log == nil {
		return zap.NewNop()
	}
	return zap.New(slogCore{log: log.With("part", "etcd")})
}

type slogCore struct{ log *slog.Logger }

func level(l zapcore.Level) (slog.Level, bool) {
	switch {
	case l < zapcore.WarnLevel:
		return 0, false
	case l == zapcore.WarnLevel:
		return slog.LevelDebug, true
	case l == zapcore.ErrorLevel:
		return slog.LevelWarn, true
	default:
		return slog.LevelError, true
	}
}

func (c slogCore) Enabled(l zapcore.Level) bool {
	to, ok := level(l)
	return ok && c.log.Enabled(context.Background(), to)
}

func (c slogCore) With(fields []zapcore.Field) zapcore.Core {
	return slogCore{log: c.log.With(attrs(fields)...)}
}

func (c slogCore) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return ce.AddCore(e, c)
	}
	return ce
}

func (c slogCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	to, _ := level(e.Level)
	if e.Message == earlyVersion {
		to = slog.LevelDebug
	}
	c.log.Log(context.Background(), to, "etcd", append(attrs(fields), "msg_etcd", e.Message)...)
	return nil
}

// earlyVersion is what etcd says, as an error, when it looks for the version of a new database before anything was written
// to it. It looks again every few seconds.
const earlyVersion = "failed to update storage version"

func (c slogCore) Sync() error { return nil }

func attrs(fields []zapcore.Field) []any {
	enc := zapcore.NewMapObjectEncoder()
	for _, f := range fields {
		f.AddTo(enc)
	}
	out := make([]any, 0, 2*len(enc.Fields))
	for k, v := range enc.Fields {
		out = append(out, k, v)
	}
	return out
}
