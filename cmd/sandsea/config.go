package main

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/BurntSushi/toml"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/edge/backend/container/native"
)

// serverConfig is what the daemons need to know. A flag goes before SANDSEA_*, that before the file, that before the
// default.
type serverConfig struct {
	// Data is the data directory, absolute.
	Data string `toml:"data"`
	// Listen is the address of the public API.
	Listen string `toml:"listen"`
	// ClusterListen is where sandsea server lets nodes reach the store.
	ClusterListen string `toml:"cluster_listen"`
	// NodeListen is where sandsea edge lets servers and other nodes reach this one.
	NodeListen string `toml:"node_listen"`
	// LogLevel is debug, info, warn or error.
	LogLevel string `toml:"log_level"`
	// MemoryOvercommit is how many times the node's memory may be promised.
	MemoryOvercommit float64 `toml:"memory_overcommit"`
	// CPUOvercommit is how many times the node's CPUs may be promised.
	CPUOvercommit float64 `toml:"cpu_overcommit"`
	// MaxSandboxes bounds the node; 0 lets the node's own limits decide.
	MaxSandboxes int `toml:"max_sandboxes"`
	// WarmSandboxes is how many sandboxes are made ready ahead of their creates, up to what depends on these.
	WarmSandboxes int `toml:"warm_sandboxes"`
}

// The defaults. A sandbox uses a fraction of what it asked for most of the time (spec/dsec.md: 90 % of them below 5 % of a
// CPU), so that a node promises more than it has.
func defaultServerConfig() serverConfig {
	return serverConfig{
		Data: "/var/lib/sandsea", Listen: "127.0.0.1:7070", LogLevel: "warn",
		ClusterListen: "127.0.0.1:7071", NodeListen: "0.0.0.0:7072",
		MemoryOvercommit: 4, CPUOvercommit: 50, WarmSandboxes: native.DefaultWarm,
	}
}

// maxWarm bounds what lies idle.
const maxWarm = 256

// systemConfig is read when it is there; the working directory never is.
const systemConfig = "/etc/sandsea/sandsea.toml"

// loadServerConfig reads the file and the environment over the defaults. A named file must exist.
func loadServerConfig(file string, env func(string) string) (serverConfig, error) {
	cfg := defaultServerConfig()
	named := file != ""
	if !named {
		file = systemConfig
	}
	text, err := os.ReadFile(file)
	switch {
	case errors.Is(err, fs.ErrNotExist) && !named:
	case err != nil:
		return cfg, misuse(errdefs.New(errdefs.Invalid, file, "%s", rootMessage(err)).WithHint("Give another: --config FILE"))
	default:
		all := fileConfig{serverConfig: cfg}
		if err := decodeConfig(file, string(text), &all); err != nil {
			return cfg, err
		}
		cfg = all.serverConfig
	}
	if v := env("SANDSEA_DATA"); v != "" {
		cfg.Data = v
	}
	if v := env("SANDSEA_LISTEN"); v != "" {
		cfg.Listen = v
	}
	if v := env("SANDSEA_LOG_LEVEL"); v != "" {
		cfg.LogLevel = v
	}
	return cfg, nil
}

// fileConfig is all that a configuration file may hold: the daemons and the clients of a machine share one.
type fileConfig struct {
	serverConfig
	clientConfig
}

// decodeConfig refuses unknown keys, with the line and the key that was meant.
func decodeConfig(file, text string, cfg *fileConfig) error {
	meta, err := toml.Decode(text, cfg)
	if err != nil {
		msg := err.Error()
		if pe, ok := errors.AsType[toml.ParseError](err); ok {
			file, msg = fmt.Sprintf("%s:%d", file, pe.Position.Line), pe.Message
		}
		return misuse(errdefs.New(errdefs.Invalid, file, "%s", ui.Text(msg)).WithHint("Correct the file"))
	}
	unknown := meta.Undecoded()
	if len(unknown) == 0 {
		return nil
	}
	key := unknown[0].String()
	object := file
	for i, l := range strings.Split(text, "\n") {
		if strings.HasPrefix(strings.TrimSpace(l), key) {
			object = fmt.Sprintf("%s:%d", file, i+1)
			break
		}
	}
	known := append(keysOf(serverConfig{}), keysOf(clientConfig{})...)
	e := errdefs.New(errdefs.Invalid, object, "unknown key %s", ui.Text(key)).WithField(key, "")
	if near := ui.Nearest(key, known); near != "" {
		return misuse(e.WithHint("Did you mean %s?", near))
	}
	return misuse(e.WithHint("Known: %s", strings.Join(known, ", ")))
}

// validate checks every field.
func (c serverConfig) validate() error {
	bad := func(field, format string, args ...any) error {
		return misuse(errdefs.New(errdefs.Invalid, "", format, args...).WithField(field, "").
			WithHint("Correct it in the configuration file, the environment or by flag"))
	}
	if !filepath.IsAbs(c.Data) {
		return bad("data", "data directory %q is not absolute", ui.Text(c.Data))
	}
	for key, addr := range map[string]string{
		"listen": c.Listen, "cluster_listen": c.ClusterListen, "node_listen": c.NodeListen,
	} {
		if _, _, err := net.SplitHostPort(addr); err != nil {
			return bad(key, "%s address %q: write HOST:PORT", strings.ReplaceAll(key, "_", " "), ui.Text(addr))
		}
	}
	switch c.LogLevel {
	case "debug", "info", "warn", "error":
	default:
		return bad("log_level", "log level %q: debug, info, warn or error", ui.Text(c.LogLevel))
	}
	if !(c.MemoryOvercommit >= 1 && c.MemoryOvercommit <= 1000) {
		return bad("memory_overcommit", "memory_overcommit %g: 1 to 1000", c.MemoryOvercommit)
	}
	if !(c.CPUOvercommit >= 1 && c.CPUOvercommit <= 10000) {
		return bad("cpu_overcommit", "cpu_overcommit %g: 1 to 10000", c.CPUOvercommit)
	}
	if c.MaxSandboxes < 0 {
		return bad("max_sandboxes", "max_sandboxes %d is negative", c.MaxSandboxes)
	}
	if c.WarmSandboxes < 0 || c.WarmSandboxes > maxWarm {
		return bad("warm_sandboxes", "warm_sandboxes %d: 0 to %d", c.WarmSandboxes, maxWarm)
	}
	return nil
}

// rootMessage is the innermost message of an error.
func rootMessage(err error) string {
	for {
		next := errors.Unwrap(err)
		if next == nil {
			return err.Error()
		}
		err = next
	}
}
