package sandbox

import (
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/node"
)

// Upper bounds that keep arithmetic safe; a node's capacity is the real bound.
const (
	maxBytes      = 1 << 50
	maxCPUMillis  = 4096 * 1000
	maxPids       = 1 << 22
	maxOpenFiles  = 1 << 20
	maxToolkits   = 62
	maxRequire    = 64
	maxNameBytes  = 512
	maxPathBytes  = 4096
	maxTrainBytes = 256
	// MaxInsideID is the largest uid and gid that exists inside a sandbox.
	MaxInsideID = 65535
)

// Validate checks every field, fills the defaults and returns the complete Spec. An error is errdefs.Invalid, names the
// field in the words of the API ("limits.memory_bytes", "network.phases[0].name") and the bound.
//
// The default of OpenFiles stands for "as many as the node can give, at most DefaultOpenFiles": see Limits.On.
func (s Spec) Validate() (Spec, error) {
	s.Backend = or(s.Backend, "container")
	s.Class = or(s.Class, "native")
	s.Entrypoint = or(s.Entrypoint, EntrypointIdle)
	s.TTL = or(s.TTL, DefaultTTL)
	l := &s.Limits
	l.Memory = or(l.Memory, DefaultMemory)
	l.CPUMillis = or(l.CPUMillis, DefaultCPUMillis)
	l.Disk = or(l.Disk, DefaultDisk)
	l.Pids = or(l.Pids, DefaultPids)
	l.OpenFiles = or(l.OpenFiles, DefaultOpenFiles)
	l.Output = or(l.Output, DefaultOutput)
	network, badNetwork := s.Network.Validate()
	for _, err := range []error{
		s.checkKind(), s.Environment.check(), s.Limits.check(), s.checkLife(), badNetwork, s.checkCommands(),
		checkLabels(s.Labels), s.checkTraining(),
	} {
		if err != nil {
			return s, err
		}
	}
	s.Network = network
	return s, nil
}

func or[T comparable](v, fallback T) T {
	var zero T
	if v == zero {
		return fallback
	}
	return v
}

func invalid(field, limit, format string, args ...any) *errdefs.Error {
	return errdefs.New(errdefs.Invalid, "", field+": "+format, args...).WithField(field, limit)
}

func (s Spec) checkKind() error {
	if s.Backend != "container" {
		return invalid("backend", "", "%q is not built", clip(s.Backend)).WithHint("Use container")
	}
	if s.Class != "native" {
		return invalid("class", "", "%q is not built", clip(s.Class)).WithHint("Use native")
	}
	return nil
}

func (e Environment) check() error {
	parts := e.Base != "" || e.Workspace != "" || len(e.Toolkits) > 0
	switch {
	case e.Image != "" && parts:
		return invalid("environment.image", "", "an image is complete, it goes with no base, workspace or toolkits").
			WithHint("Give image alone, or base with what goes on top")
	case e.Image == "" && e.Base == "" && parts:
		return invalid("environment.base", "", "missing below a workspace or toolkit").WithHint("Name the base image")
	case e.Image == "" && e.Base == "":
		return invalid("environment", "", "names no image").
			WithHint("Set environment.image; sandsea image ls shows what there is")
	case len(e.Toolkits) > maxToolkits:
		return invalid("environment.toolkits", "62 toolkits", "%d toolkits", len(e.Toolkits)).WithHint("Give at most 62")
	}
	names := map[string]string{"image": e.Image, "base": e.Base, "workspace": e.Workspace}
	for _, part := range []string{"image", "base", "workspace"} {
		if err := checkText("environment."+part, names[part], maxNameBytes); err != nil {
			return err
		}
	}
	for _, t := range e.Toolkits {
		if t == "" {
			return invalid("environment.toolkits", "", "holds an empty name").WithHint("Leave it out")
		}
		if err := checkText("environment.toolkits", t, maxNameBytes); err != nil {
			return err
		}
	}
	return nil
}

func (l Limits) check() error {
	for _, b := range []struct {
		field     string
		v, lo, hi int64
		unit      string
	}{
		{"limits.memory_bytes", l.Memory, MinMemory, maxBytes, "bytes"},
		{"limits.cpu_millis", l.CPUMillis, MinCPUMillis, maxCPUMillis, "thousandths of a CPU"},
		{"limits.disk_bytes", l.Disk, MinDisk, maxBytes, "bytes"},
		{"limits.pids", l.Pids, MinPids, maxPids, "processes"},
		{"limits.open_files", l.OpenFiles, 16, maxOpenFiles, "files"},
		{"limits.output_bytes", l.Output, MinOutput, maxBytes, "bytes"},
	} {
		if b.v < b.lo {
			return invalid(b.field, fmt.Sprint(b.lo, " ", b.unit), "%d is below the minimum of %d %s", b.v, b.lo, b.unit).
				WithHint("Ask for at least %d, or leave it out for the default", b.lo)
		}
		if b.v > b.hi {
			return invalid(b.field, fmt.Sprint(b.hi, " ", b.unit), "%d is above the maximum of %d %s", b.v, b.hi, b.unit).
				WithHint("Ask for at most %d", b.hi)
		}
	}
	return nil
}

// On gives the limits as they hold on a node with these capabilities: the default of open files yields to a lower hard
// limit of the node.
func (l Limits) On(c node.Capabilities) Limits {
	if l.OpenFiles == DefaultOpenFiles && c.NoFile > 0 {
		l.OpenFiles = min(l.OpenFiles, c.NoFile)
	}
	return l
}

func (s Spec) checkLife() error {
	if s.Idle < 0 || s.Idle > MaxTTL {
		return invalid("idle_ms", "30 days", "%s is not between 0 and 30 days", s.Idle).WithHint("0 means never")
	}
	return CheckTTL(s.TTL)
}

// CheckTTL checks a hard lifetime as create and ExtendTTL take it.
func CheckTTL(d time.Duration) error {
	if d <= 0 || d > MaxTTL {
		return invalid("ttl_ms", "30 days", "%s is not above 0 and at most 30 days", d).WithHint("Give at most 30 days")
	}
	return nil
}

func (s Spec) checkCommands() error {
	if err := CheckUser("user", s.User); err != nil {
		return err
	}
	if err := CheckEnv("env", s.Env); err != nil {
		return err
	}
	if s.Workdir != "" && !strings.HasPrefix(s.Workdir, "/") {
		return invalid("workdir", "", "%q is not absolute", clip(s.Workdir)).WithHint("Start it with /")
	}
	if err := checkText("workdir", s.Workdir, maxPathBytes); err != nil {
		return err
	}
	switch s.Entrypoint {
	case EntrypointIdle, EntrypointImage:
		if len(s.Argv) > 0 {
			return invalid("entrypoint.argv", "", "is for the mode argv only, the mode is %s", s.Entrypoint).
				WithHint("Set the mode argv, or leave argv out")
		}
	case EntrypointArgv:
		return CheckArgv("entrypoint.argv", s.Argv)
	default:
		return invalid("entrypoint.mode", "", "%q is unknown", clip(string(s.Entrypoint))).WithHint("Use idle, image or argv")
	}
	return nil
}

func (s Spec) checkTraining() error {
	if len(s.Require) > maxRequire {
		return invalid("require", "64 features", "%d features", len(s.Require)).WithHint("Name at most 64")
	}
	for _, name := range s.Require {
		if name == "" {
			return invalid("require", "", "holds an empty name").WithHint("Leave it out; sandsea doctor lists the names")
		}
		if err := checkText("require", name, maxTrainBytes); err != nil {
			return err
		}
	}
	for field, v := range map[string]string{"job": s.Job, "rollout": s.Rollout} {
		if err := checkText(field, v, maxTrainBytes); err != nil {
			return err
		}
	}
	if s.Attempt < 0 {
		return invalid("attempt", "", "%d is below 0", s.Attempt).WithHint("Count attempts from 0")
	}
	if s.ParentSeq < 0 || s.ParentID == "" && s.ParentSeq != 0 {
		return invalid("parent.seq", "", "%d names no event of a parent", s.ParentSeq).
			WithHint("Give parent.id with it, and count from 0")
	}
	if s.ParentID != "" {
		if _, err := Parse(s.ParentID); err != nil {
			return invalid("parent.id", "", "%q is no sandbox id", clip(s.ParentID)).WithHint("Give all 27 letters")
		}
	}
	return nil
}

func checkLabels(labels map[string]string) error {
	if len(labels) > MaxLabels {
		return invalid("labels", "64 labels", "%d labels", len(labels)).WithHint("Give at most %d", MaxLabels)
	}
	for k, v := range labels {
		if k == "" {
			return invalid("labels", "", "holds an empty name").WithHint("Name every label")
		}
		for _, t := range []string{k, v} {
			if err := checkText("labels", t, MaxLabelBytes); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkText refuses what no name or path may hold.
func checkText(field, s string, most int) error {
	switch {
	case len(s) > most:
		return invalid(field, strconv.Itoa(most)+" bytes", "%d bytes", len(s)).WithHint("Use at most %d bytes", most)
	case !utf8.ValidString(s):
		return invalid(field, "", "is not UTF-8").WithHint("Encode it as UTF-8")
	case strings.ContainsFunc(s, unicode.IsControl):
		return invalid(field, "", "holds a control character").WithHint("Remove it")
	}
	return nil
}

// CheckKey checks an idempotency key; the empty one is no key.
func CheckKey(field, key string) error { return checkText(field, key, MaxKeyBytes) }

// CheckEnv checks the environment of a sandbox or a command.
func CheckEnv(field string, env map[string]string) error {
	total := 0
	for k, v := range env {
		switch {
		case k == "":
			return invalid(field, "", "holds a variable without a name").WithHint("Name every variable")
		case strings.ContainsAny(k, "=\x00"):
			return invalid(field, "", "the name %q holds = or NUL", clip(k)).WithHint("Rename the variable")
		case strings.Contains(v, "\x00"):
			return invalid(field, "", "the value of %s holds NUL", clip(k)).WithHint("Remove it")
		}
		total += len(k) + len(v) + 2
	}
	if total > MaxEnvBytes {
		return invalid(field, "2 MiB", "%d bytes of variables", total).WithHint("Pass large values in files")
	}
	return nil
}

// CheckArgv checks what is executed. A single long argument is left to the kernel, which answers E2BIG.
func CheckArgv(field string, argv []string) error {
	if len(argv) == 0 || argv[0] == "" {
		return invalid(field, "", "names no program").WithHint("Put the program first")
	}
	total := 0
	for i, a := range argv {
		if strings.Contains(a, "\x00") {
			return invalid(field, "", "argument %d holds NUL", i).WithHint("Remove it")
		}
		total += len(a) + 1
	}
	if total > MaxEnvBytes {
		return invalid(field, "2 MiB", "%d bytes of arguments", total).WithHint("Pass large values in files or as input")
	}
	return nil
}

// CheckPath checks a path inside a sandbox, absolute or relative.
func CheckPath(field, path string) error {
	switch {
	case len(path) > maxPathBytes:
		return invalid(field, "4096 bytes", "%d bytes", len(path)).WithHint("Use at most 4096 bytes")
	case strings.Contains(path, "\x00"):
		return invalid(field, "", "holds NUL").WithHint("Remove it")
	}
	return nil
}

// CheckUser checks a user as "name", "uid" or "uid:gid"; names are looked up inside the sandbox later. The empty one is
// fine.
func CheckUser(field, user string) error {
	if err := checkText(field, user, maxTrainBytes); err != nil || user == "" {
		return err
	}
	owner, group, hasGroup := strings.Cut(user, ":")
	for _, part := range []string{owner, group} {
		if part == "" || strings.ContainsAny(part, ":/ ") {
			return invalid(field, "", "%q is no user", clip(user)).WithHint("Give a name, a uid or uid:gid")
		}
		if strings.Trim(part, "0123456789") == "" {
			if n, err := strconv.ParseUint(part, 10, 32); err != nil || n > MaxInsideID {
				return invalid(field, "65535", "%s is beyond the ids inside a sandbox, 0 to 65535", part).
					WithHint("Use a smaller id")
			}
		}
		if !hasGroup {
			break
		}
	}
	return nil
}

// needs lists what every container needs, with the field that asks for it.
var needs = [...]struct{ feature, field string }{
	{node.FeatureMemory, "limits.memory_bytes"},
	{node.FeatureCPU, "limits.cpu_millis"},
	{node.FeaturePids, "limits.pids"},
	{node.FeatureDisk, "limits.disk_bytes"},
	{node.FeatureOpenFiles, "limits.open_files"},
	{node.FeatureOutput, "limits.output_bytes"},
	{node.FeatureKill, "backend"},
	{node.FeatureUserNS, "backend"},
	{node.FeatureSeccomp, "backend"},
	{node.FeatureLayers, "environment"},
	{node.FeatureNetwork, "network"},
}

// Missing gives the first feature that the spec needs and c does not enforce, and the field that needs it.
func (s Spec) Missing(c node.Capabilities) (f node.Feature, field string, missing bool) {
	for _, n := range needs {
		if !c.Enforces(n.feature) {
			return c.Feature(n.feature), n.field, true
		}
	}
	if s.Network.Open() && !c.Enforces(node.FeatureEgress) {
		return c.Feature(node.FeatureEgress), "network", true
	}
	if want := s.Limits.On(c).OpenFiles; want > c.NoFile {
		f = c.Feature(node.FeatureOpenFiles)
		f.Status = node.Missing
		f.Fix = "ask for at most " + strconv.FormatInt(c.NoFile, 10) + " open files, or raise the hard limit of sandsea edge"
		return f, "limits.open_files", true
	}
	for _, name := range s.Require {
		if !c.Enforces(name) {
			return c.Feature(name), "require", true
		}
	}
	return node.Feature{}, "", false
}

// MissingError is the refusal for what Missing found.
func MissingError(f node.Feature, field string) error {
	e := errdefs.New(errdefs.FailedPrecondition, "", "%s: this node cannot enforce %s (%s)", field, f.Name, f.Status).
		WithField(field, "")
	e.Feature = f.Name
	if f.Fix != "" {
		e.Hint = strings.ToUpper(f.Fix[:1]) + f.Fix[1:]
	} else {
		e.Hint = "See sandsea doctor"
	}
	return e
}
