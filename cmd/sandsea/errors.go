package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

// Exit codes beside the commands' own: 0, 1 failed, 2 usage and nothing done.
const (
	// exitPlatform is a failure of ours where the exit code belongs to the command inside.
	exitPlatform = 125
	// exitInterrupted is 128 + SIGINT, exitPipe 128 + SIGPIPE.
	exitInterrupted = 130
	exitPipe        = 141
)

// exitError ends the program with a code. err, when there is one, is printed first.
type exitError struct {
	code int
	err  error
	// inside: the code is that of the command in the sandbox.
	inside bool
	// fields go with the error in its JSON form.
	fields object
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// wraps marks commands whose exit codes belong to the command inside: our own failures are 125.
var wraps = map[string]string{"wraps": "yes"}

// exitCode prints err once and chooses the exit code.
func (a *app) exitCode(ctx context.Context, cmd *cobra.Command, err error) int {
	broken := a.io.OutError()
	if errors.Is(broken, syscall.EPIPE) {
		return exitPipe // the reader has what it wanted
	}
	if err == nil && broken != nil {
		err = fmt.Errorf("standard output: %w", broken)
	}
	if err == nil {
		return 0
	}
	code := 1
	exit, chosen := errors.AsType[*exitError](err)
	if chosen {
		code = exit.code
	}
	if cmd != nil && cmd.Annotations["wraps"] != "" && (!chosen || !exit.inside) {
		code = exitPlatform
	}
	if chosen && exit.err == nil {
		return code
	}
	if errors.Is(context.Cause(ctx), errInterrupted) {
		a.complain(a.wasInterrupted())
		return exitInterrupted
	}
	a.complain(err)
	return code
}

func (a *app) wasInterrupted() error {
	e := errdefs.New(errdefs.Canceled, "", "interrupted")
	if a.undone != "" {
		e.Msg += ": " + a.undone
	}
	return e
}

// complain prints an error: one sentence, or with --json one line of JSON.
func (a *app) complain(err error) {
	e := explain(err)
	if !a.json {
		fmt.Fprintln(a.io.Err, "sandsea: "+a.io.Plain(ui.Text(sentence(e))))
		return
	}
	var fields object
	if exit, ok := errors.AsType[*exitError](err); ok {
		fields = exit.fields
	}
	_ = printJSON(a.io.Err, object{{"error", append(errorObject(e), fields...)}}) // there is nowhere else to say it
}

// complainOf prints an error that came n times inside an answer about many.
func (a *app) complainOf(d *sandseav1.ErrorDetail, message string, n int) {
	e := errwire.FromDetail(d, message)
	if a.json {
		a.complain(&exitError{err: e, fields: object{{"count", n}}})
		return
	}
	a.io.Note("sandsea: %d not made: %s", n, ui.Text(e.Error()))
}

// sentence is an error for people. Who has interrupted needs no hint.
func sentence(e *errdefs.Error) string {
	if e.Kind == errdefs.Canceled && e.Hint == "" {
		return e.Msg
	}
	return e.Error()
}

// explain gives every error a kind and a way out; those of the local files have none of ours.
func explain(err error) *errdefs.Error {
	if e, ok := errors.AsType[*errdefs.Error](err); ok {
		return e
	}
	e := errdefs.From(err)
	local := func(kind errdefs.Kind, hint string) *errdefs.Error {
		return errdefs.New(kind, "", "%s", e.Msg).WithHint("%s", hint).Wrap(err)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return local(errdefs.NotFound, "Check the path")
	case errors.Is(err, fs.ErrPermission):
		return local(errdefs.Denied, "Check its owner and mode")
	case errors.Is(err, fs.ErrExist):
		return local(errdefs.AlreadyExists, "Choose another path")
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return local(errdefs.Exhausted, "Free some space")
	}
	if errno, ok := errors.AsType[syscall.Errno](err); ok && errno != 0 {
		return local(errdefs.FailedPrecondition, "Check the path")
	}
	return e
}

// errorObject is an error as programs read it.
func errorObject(e *errdefs.Error) object {
	out := object{
		{"kind", string(e.Kind)}, {"message", strings.TrimSuffix(e.Error(), ". "+e.HintText())}, {"hint", e.HintText()},
	}
	for _, f := range []member{
		{"object", e.Object},
		{"field", e.Field},
		{"limit", e.Limit},
		{"cause", e.Cause},
		{"feature", e.Feature},
		{"stage", e.Stage},
		{"errno", e.ErrnoName},
		{"request", requestOf(e)},
	} {
		if f.value != "" {
			out = append(out, f)
		}
	}
	if len(e.Near) > 0 {
		out = append(out, member{"near", e.Near})
	}
	if e.RetryAfter > 0 {
		out = append(out, member{"retry_after_ms", e.RetryAfter.Milliseconds()})
	}
	return out
}

// ofArchive names the file in what the server, which does not know its name, says of an archive.
func ofArchive(err error, source string) error {
	e, ok := errors.AsType[*errdefs.Error](err)
	if _, file, cut := strings.Cut(source, ":"); ok && cut && e.Object == "archive" && file != "-" {
		named := *e
		named.Object = filepath.Base(file)
		return &named
	}
	return err
}

// requestOf is the server's number for the call that failed, as its log has it.
func requestOf(err error) string {
	if ce, ok := errors.AsType[*connect.Error](err); ok {
		return ce.Meta().Get("Sandsea-Request")
	}
	return ""
}

// usage makes an error of the command line itself: exit 2, nothing done.
func usage(cmd *cobra.Command, format string, args ...any) error {
	return misuse(errdefs.New(errdefs.Invalid, "", format, args...).WithHint("See: %s --help", cmd.CommandPath()))
}

func misuse(e *errdefs.Error) error { return &exitError{code: 2, err: e} }

// flagError says what is wrong with a flag, and which one was meant.
func flagError(cmd *cobra.Command, err error) error {
	if words := cmd.Flags().Args(); cmd.HasSubCommands() && len(words) > 0 {
		return unknownCommand(cmd, words[0])
	}
	invalid := func(field, format string, args ...any) *errdefs.Error {
		return errdefs.New(errdefs.Invalid, "", format, args...).WithField(field, "").WithHint("See: %s --help", cmd.CommandPath())
	}
	if unknown, ok := errors.AsType[*pflag.NotExistError](err); ok {
		return misuse(unknownFlag(cmd, unknown, invalid))
	}
	if bad, ok := errors.AsType[*pflag.InvalidValueError](err); ok {
		flag := bad.GetFlag()
		kind := map[string]string{
			"duration": "is no time span; write it as 60s or 5m", "bool": "is neither true nor false", "int": "is no whole number",
			"int64": "is no whole number", "float64": "is no number",
		}[flag.Value.Type()]
		if kind == "" {
			kind = "is not valid"
		}
		return misuse(invalid(flag.Name, "--%s %s: %s", flag.Name, ui.Text(bad.GetValue()), kind))
	}
	if missing, ok := errors.AsType[*pflag.ValueRequiredError](err); ok {
		return misuse(invalid(missing.GetFlag().Name, "--%s: needs a value", missing.GetFlag().Name))
	}
	return misuse(invalid("", "%s", ui.Text(err.Error())))
}

func unknownFlag(cmd *cobra.Command, err *pflag.NotExistError, invalid func(field, format string, args ...any) *errdefs.Error) *errdefs.Error {
	name, dashes := err.GetSpecifiedName(), "--"
	word := name
	if shorts := err.GetSpecifiedShortnames(); shorts != "" {
		dashes, word = "-", shorts // "-memory" is read as -m -e …; perhaps --memory was meant
	}
	e := invalid(name, "unknown flag %s%s", dashes, ui.Text(name))
	var known []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			known = append(known, f.Name)
		}
	})
	if near := ui.Nearest(word, known); near != "" && len(word) > 1 {
		e.WithHint("Did you mean --%s?", near)
	}
	return e
}

// strict makes a command and those below it refuse arguments in our words. A group prints its help and refuses unknown
// words, which cobra would take for a question.
func strict(cmd *cobra.Command) {
	cmd.DisableFlagsInUseLine = true
	if cmd.HasSubCommands() {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return unknownCommand(cmd, args[0])
			}
			return nil
		}
		cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	} else if check := cmd.Args; check != nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			if check(cmd, args) == nil {
				return nil
			}
			what := fmt.Sprintf("%d arguments", len(args))
			switch len(args) {
			case 0:
				what = "nothing named"
			case 1:
				what = "one argument, " + ui.Text(args[0])
			}
			return misuse(errdefs.New(errdefs.Invalid, "", "%s: %s", cmd.Name(), what).WithHint("Usage: %s", cmd.UseLine()))
		}
	}
	for _, c := range cmd.Commands() {
		strict(c)
	}
}

// unknownCommand says which command was meant.
func unknownCommand(cmd *cobra.Command, word string) error {
	e := errdefs.New(errdefs.Invalid, "", "unknown command %q", ui.Text(word)).WithHint("All: %s --help", cmd.CommandPath())
	var known []string
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			known = append(known, c.Name())
		}
	}
	if near := ui.Nearest(word, known); near != "" {
		e.WithHint("Did you mean %s?", near)
	} else if i := slices.IndexFunc(known, func(k string) bool { return len(word) > 1 && strings.HasPrefix(k, word) }); i >= 0 {
		e.WithHint("Did you mean %s?", known[i])
	}
	return misuse(e)
}
