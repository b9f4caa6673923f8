package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

// clientConfig is what the clients need to know. SANDSEA_* goes before the user's file, that before the system's, that
// before the default.
type clientConfig struct {
	// URL of the server.
	URL string `toml:"url"`
	// TokenFile holds the token; the token itself is in no configuration file.
	TokenFile string `toml:"token_file"`
	// Project is one of those that the token covers; empty is the token's own.
	Project string `toml:"project"`
	// Timeout is how long a call may take to its answer, as "2m"; streams have no limit.
	Timeout string `toml:"timeout"`
}

// callLimit is the default of Timeout: more than any call of the server takes.
const callLimit = 2 * time.Minute

// keysOf are the names that a part of the configuration has in a file.
func keysOf(part any) []string {
	var out []string
	for t, i := reflect.TypeOf(part), 0; i < t.NumField(); i++ {
		out = append(out, t.Field(i).Tag.Get("toml"))
	}
	return out
}

// configValue is a setting and where it comes from.
type configValue struct{ name, value, origin string }

// clientSettings finds the client's settings and their origins. Files that are not there are no error.
func clientSettings(env func(string) string, files ...string) ([]configValue, error) {
	values := []configValue{
		{"url", client.DefaultURL, "default"},
		{"token_file", client.DefaultTokenFile, "default"},
		{"project", "", "default"},
		{"timeout", callLimit.String(), "default"},
	}
	for _, file := range slices.Backward(files) {
		text, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) && file == systemConfig {
			continue
		}
		if err != nil {
			return nil, misuse(errdefs.New(errdefs.Invalid, file, "%s", rootMessage(err)).WithHint("Correct the file"))
		}
		var cfg fileConfig
		if err := decodeConfig(file, string(text), &cfg); err != nil {
			return nil, err
		}
		for i, v := range []string{cfg.URL, cfg.TokenFile, cfg.Project, cfg.Timeout} {
			if v != "" {
				values[i].value, values[i].origin = v, file
			}
		}
	}
	for i, name := range []string{"SANDSEA_URL", "SANDSEA_TOKEN_FILE", "SANDSEA_PROJECT", "SANDSEA_TIMEOUT"} {
		if v := env(name); v != "" {
			values[i].value, values[i].origin = v, name
		}
	}
	if env("SANDSEA_TOKEN") != "" {
		values[1].value, values[1].origin = "not used: the token is given", "SANDSEA_TOKEN"
	}
	return values, nil
}

// configFiles are the files that a client reads, the first before the second.
func configFiles(env func(string) string) []string {
	dir := env("XDG_CONFIG_HOME")
	if dir == "" && env("HOME") != "" {
		dir = filepath.Join(env("HOME"), ".config")
	}
	if !filepath.IsAbs(dir) {
		return []string{systemConfig}
	}
	return []string{filepath.Join(dir, "sandsea", "config.toml"), systemConfig}
}

// client connects to the server that the environment, or a configuration file, names.
func (a *app) client() (*client.Client, error) {
	values, err := clientSettings(os.Getenv, configFiles(os.Getenv)...)
	if err != nil {
		return nil, err
	}
	cfg := client.Config{URL: values[0].value, Project: values[2].value}
	if tokens := values[1]; filepath.IsAbs(tokens.origin) { // the client itself looks at the rest
		cfg.TokenFile = tokens.value
	}
	limit, err := time.ParseDuration(values[3].value)
	if err != nil || limit <= 0 {
		return nil, misuse(errdefs.New(errdefs.Invalid, "", "timeout %s: is no time span; write it as 30s or 2m", ui.Text(values[3].value)).
			WithField("timeout", "").WithHint("See where it is set: sandsea config"))
	}
	a.callLimit = limit
	cfg.HTTP = &http.Client{Transport: &limited{
		a: a, limit: limit, debug: os.Getenv("SANDSEA_DEBUG") == "1", next: client.Transport(),
	}}
	c, err := client.New(cfg)
	if err == nil {
		a.clients = append(a.clients, c)
	}
	return c, err
}

// settle waits, after an interrupt, until sandboxes whose creates it cut off are gone.
func (a *app) settle(ctx context.Context) {
	ctx, stop := context.WithTimeoutCause(ctx, settleLimit, errdefs.Deadline)
	defer stop()
	defer a.io.Waiting("the sandbox to be stopped again", settleLimit)()
	for _, c := range a.clients {
		if c.Settle(ctx) != nil {
			a.undone = "a sandbox may have been made: sandsea ls"
		}
	}
}

// limited bounds the calls that are no streams, and tells of each when asked to.
type limited struct {
	a     *app
	limit time.Duration
	debug bool
	next  http.RoundTripper
}

// RoundTrip makes one call.
func (l *limited) RoundTrip(r *http.Request) (*http.Response, error) {
	done := func() {}
	if !strings.HasPrefix(r.Header.Get("Content-Type"), "application/connect+") {
		ctx, cancel := context.WithTimeoutCause(r.Context(), l.limit, context.DeadlineExceeded)
		r, done = r.WithContext(ctx), cancel
	}
	began := time.Now()
	res, err := l.next.RoundTrip(r)
	if l.debug {
		l.tell(r, res, err, time.Since(began))
	}
	if err != nil {
		done()
		return nil, err
	}
	res.Body = &body{ReadCloser: res.Body, done: done}
	return res, nil
}

// tell says on standard error what was asked and answered; neither headers nor bodies, which may hold secrets.
func (l *limited) tell(r *http.Request, res *http.Response, err error, took time.Duration) {
	var answer string
	if err != nil {
		answer = ui.Text(rootMessage(err))
	} else {
		answer = fmt.Sprint(res.StatusCode, " ", res.Header.Get("Sandsea-Request"))
	}
	call := path.Base(path.Dir(r.URL.Path)) + "/" + path.Base(r.URL.Path)
	fmt.Fprintf(l.a.io.Err, "sandsea: debug: %s %s %s\n", call, strings.TrimSpace(ui.Text(answer)), ui.Took(took))
}

// body ends its call's limit when it is closed.
type body struct {
	io.ReadCloser
	done func()
}

func (b *body) Close() error {
	defer b.done()
	return b.ReadCloser.Close()
}

func (a *app) configCommand() *cobra.Command {
	return &cobra.Command{
		Use: "config", Short: "Show the settings in force and where each comes from", Args: cobra.NoArgs,
		Long: `A flag goes before SANDSEA_*, that before ~/.config/sandsea/config.toml, that before /etc/sandsea/sandsea.toml, that before
the default. The daemons' settings are read from the system's file alone.`,
		Example: "  sandsea config\n  sandsea config --json | jq -r '.[] | select(.name == \"url\").value'",
		RunE: func(*cobra.Command, []string) error {
			values, err := clientSettings(os.Getenv, configFiles(os.Getenv)...)
			if err != nil {
				return err
			}
			daemons, err := daemonSettings(os.Getenv)
			if err != nil {
				return err
			}
			values = append(values, daemons...)
			if a.json {
				list := make([]object, 0, len(values))
				for _, v := range values {
					list = append(list, object{
						{"schema", "sandsea.setting/1"}, {"name", v.name}, {"value", v.value}, {"origin", v.origin},
					})
				}
				return printJSON(a.io.Out, list)
			}
			a.printSettings(values)
			return nil
		},
	}
}

// daemonSettings are those that `sandsea up` would take.
func daemonSettings(env func(string) string) ([]configValue, error) {
	def := defaultServerConfig()
	file, err := loadServerConfig("", func(string) string { return "" })
	if errors.Is(err, fs.ErrPermission) {
		file, err = def, nil
	}
	if err != nil {
		return nil, err
	}
	all, err := loadServerConfig("", env)
	if err != nil {
		return nil, err
	}
	var out []configValue
	for i, name := range keysOf(all) {
		value := func(c serverConfig) string { return fmt.Sprint(reflect.ValueOf(c).Field(i)) }
		s := configValue{name, value(all), "default"}
		switch s.value {
		case value(file):
			if value(file) != value(def) {
				s.origin = systemConfig
			}
		default:
			s.origin = "SANDSEA_" + strings.ToUpper(name)
		}
		out = append(out, s)
	}
	return out, nil
}

func (a *app) printSettings(values []configValue) {
	var rows [][]ui.Cell
	for _, v := range values {
		rows = append(rows, []ui.Cell{{Text: v.name}, {Text: ui.Text(cmp.Or(v.value, "-"))}, {Text: ui.Text(v.origin)}})
	}
	a.io.Table([]ui.Column{{Name: "NAME"}, {Name: "VALUE", Cut: true, Drop: 2}, {Name: "ORIGIN", Drop: 1}}, rows)
}
