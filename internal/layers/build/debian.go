package build

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/linux/confine"
	"github.com/sandsea/sandsea/internal/typo"
)

const (
	// DefaultIDBase is where the ids of Debian imports begin when Config says nothing.
	DefaultIDBase = 1_000_000_000

	indexFresh  = time.Hour // an index younger than this is not asked for again unless the caller wants it
	cacheBytes  = 4 << 30   // of packages kept
	maxIncludes = 500
)

// DebianOptions say what to import.
type DebianOptions struct {
	Suite   string
	Include []string
	// Refresh asks the package index again, though an equal image is here or the index is recent.
	Refresh bool
	// Known finds an image of that name that an earlier import made. packages is empty before the index has been asked:
	// then any of that name will do; else it must be the one with these Packages. May be nil.
	Known  func(ctx context.Context, name, packages string) (Result, bool, error)
	Report Report
}

var (
	suiteName   = regexp.MustCompile(`^[a-z][a-z0-9.-]{0,63}$`)
	packageName = regexp.MustCompile(`^([a-z0-9][a-z0-9+.-]{0,126}[a-z0-9+.])(?:=[A-Za-z0-9.+:~-]{1,127})?$`)
)

// validate gives the options in their one spelling.
func (o DebianOptions) validate() (DebianOptions, error) {
	if !suiteName.MatchString(o.Suite) {
		return o, errdefs.New(errdefs.Invalid, "debian", "%q is no suite", clip(o.Suite)).
			WithField("suite", "").WithHint("Give a name as bookworm")
	}
	if len(o.Include) > maxIncludes {
		return o, errdefs.New(errdefs.Invalid, "debian:"+o.Suite, "%d packages to include", len(o.Include)).
			WithField("include", fmt.Sprint(maxIncludes)).
			WithHint("Include at most %d; the rest comes as dependencies", maxIncludes)
	}
	o.Include = slices.Compact(slices.Sorted(slices.Values(o.Include)))
	for _, p := range o.Include {
		if !packageName.MatchString(p) {
			return o, errdefs.New(errdefs.Invalid, "debian:"+o.Suite, "%q is no package name", clip(p)).
				WithField("include", "").WithHint("Give names as git, or git=VERSION")
		}
	}
	return o, nil
}

// name is what the image is called when the caller has no wish.
func (o DebianOptions) name() string {
	n := "debian:" + o.Suite
	if len(o.Include) > 0 {
		n += "+" + strings.Join(o.Include, ",")
	}
	return n
}

// Debian imports a suite with packages from the repositories that this machine's own apt uses. The packages' scripts
// run as root of a user namespace of their own, never as the host's; see package linux/confine. One runs at a time.
func (b *Builder) Debian(ctx context.Context, opts DebianOptions) (Result, error) {
	opts, err := opts.validate()
	if err != nil {
		return Result{}, err
	}
	if opts.Known != nil && !opts.Refresh {
		res, ok, err := opts.Known(ctx, opts.name(), "")
		if err != nil {
			return Result{}, fmt.Errorf("look up %s: %w", opts.name(), err)
		}
		if ok {
			res.Existed = true
			return res, nil
		}
	}
	key := fmt.Sprintf("%s refresh=%t", opts.name(), opts.Refresh)
	return b.join(ctx, "debian", key, opts.Report, func() {}, func(ctx context.Context, p *progress) (Result, error) {
		p.stage("resolve", "packages", 0)
		select {
		case b.debian <- struct{}{}:
			defer func() { <-b.debian }()
		default:
			p.set(0, 0, "waiting for another import")
			select {
			case b.debian <- struct{}{}:
				defer func() { <-b.debian }()
			case <-ctx.Done():
				return Result{}, context.Cause(ctx)
			}
		}
		d, err := b.newDebian(ctx, opts, p)
		if err != nil {
			return Result{}, err
		}
		return d.run(ctx)
	})
}

// debianImport is one run.
type debianImport struct {
	b     *Builder
	opts  DebianOptions
	p     *progress
	arch  string
	cache string // DIR/cache/debian/<suite>-<arch>, as apt sees it at /tmp/cache
	srcs  []aptSource
}

func (d *debianImport) object() string { return "debian:" + d.opts.Suite }

func (b *Builder) newDebian(ctx context.Context, opts DebianOptions, p *progress) (*debianImport, error) {
	d := &debianImport{b: b, opts: opts, p: p}
	if os.Geteuid() != 0 {
		return nil, errdefs.New(errdefs.FailedPrecondition, d.object(), "needs root to give the packages' scripts less")
	}
	for _, tool := range []string{"mmdebstrap", "apt-get", "apt-cache", "apt-config", "dpkg", "tar"} {
		if _, err := exec.LookPath(tool); err != nil {
			return nil, errdefs.New(errdefs.FailedPrecondition, d.object(), "this machine has no %s", tool).
				WithHint("Run: apt-get install mmdebstrap").Wrap(err)
		}
	}
	arch, err := exec.CommandContext(ctx, "dpkg", "--print-architecture").Output()
	if err != nil {
		return nil, fmt.Errorf("ask dpkg for the architecture: %w", err)
	}
	d.arch = strings.TrimSpace(string(arch))
	all, err := machineSources(ctx, d.arch)
	if err != nil {
		return nil, err
	}
	if d.srcs = ofSuite(all, opts.Suite); len(d.srcs) == 0 {
		has := joinNames(suitesOf(all), 10)
		if has == "" {
			has = "none"
		}
		return nil, errdefs.New(errdefs.FailedPrecondition, d.object(),
			"this machine's apt has no source for it (it has: %s)", has).
			WithField("suite", "").WithHint("Add one to /etc/apt/sources.list.d, or import a rootfs tar")
	}
	d.cache = filepath.Join(b.dir, "cache", "debian", opts.Suite+"-"+d.arch)
	return d, nil
}

// machineSources reads the sources of this machine's apt.
func machineSources(ctx context.Context, arch string) ([]aptSource, error) {
	out, err := exec.CommandContext(ctx, "apt-config", "shell",
		"LIST", "Dir::Etc::sourcelist/f", "PARTS", "Dir::Etc::sourceparts/d").Output()
	if err != nil {
		return nil, fmt.Errorf("ask apt-config for the sources: %w", err)
	}
	var files []string
	for line := range lines(bytes.NewReader(out)) {
		k, v, _ := strings.Cut(line, "=")
		v = strings.Trim(v, "'")
		switch k {
		case "LIST":
			files = append(files, v)
		case "PARTS":
			ents, err := os.ReadDir(v)
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, fmt.Errorf("read apt's sources: %w", err)
			}
			for _, e := range ents {
				files = append(files, filepath.Join(v, e.Name()))
			}
		}
	}
	var all []aptSource
	for _, name := range files {
		parse := parseSourcesList
		switch filepath.Ext(name) {
		case ".list":
		case ".sources":
			parse = parseDeb822
		default:
			continue
		}
		f, err := os.Open(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read apt's sources: %w", err)
		}
		all = append(all, parse(f, arch)...)
		_ = f.Close()
	}
	return all, nil
}

// resolved is a set of packages that apt has chosen.
type resolved struct {
	id        string
	packages  []string // "name=version", sorted
	debs      []deb
	installed int64 // bytes that they take
	epoch     int64 // the newest date of the index
}

type deb struct {
	file string
	size int64
}

func (d *debianImport) run(ctx context.Context) (Result, error) {
	if err := d.prepareCache(ctx); err != nil {
		return Result{}, err
	}
	updated, err := d.update(ctx, d.opts.Refresh)
	if err != nil {
		return Result{}, err
	}
	var set resolved
	for {
		d.p.within("resolve", "packages")
		d.p.set(0, 0, "")
		if set, err = d.resolve(ctx); err != nil {
			return Result{}, err
		}
		d.p.set(int64(len(set.packages)), int64(len(set.packages)), "")
		if d.opts.Known != nil {
			res, ok, err := d.opts.Known(ctx, d.opts.name(), set.id)
			if err != nil {
				return Result{}, fmt.Errorf("look up %s: %w", d.opts.name(), err)
			}
			if ok {
				res.Existed = true
				return res, nil
			}
		}
		err := d.download(ctx, set)
		if err == nil {
			break
		}
		// A recent index may name packages that the mirror has replaced since.
		if updated || ctx.Err() != nil || !errors.Is(err, errdefs.Unavailable) {
			return Result{}, err
		}
		if updated, err = d.update(ctx, true); err != nil {
			return Result{}, err
		}
	}
	res, err := d.install(ctx, set)
	if err != nil {
		return Result{}, err
	}
	if err := d.trim(set); err != nil {
		d.b.log.Warn("package cache not trimmed", "err", err)
	}
	return res, nil
}

const (
	inCache = "/tmp/cache"
	inWork  = "/tmp/work"
)

// confined runs a command where it can reach the cache and, if given, a work directory.
func (d *debianImport) confined(ctx context.Context, s confine.Spec, cacheReadOnly bool, work string) error {
	s.IDBase = d.b.idBase
	s.Env = append([]string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/nonexistent", "LC_ALL=C.UTF-8",
		"DEBIAN_FRONTEND=noninteractive",
	}, s.Env...)
	s.Hide = []string{"/root", "/home"}
	s.Binds = []confine.Bind{{Source: d.cache, Name: "cache", ReadOnly: cacheReadOnly}}
	if work != "" {
		s.Binds = append(s.Binds, confine.Bind{Source: work, Name: "work"})
	}
	return confine.Run(ctx, s)
}

// apt runs apt-get or apt-cache on the cache's own state and gives its output. What it says of errors goes into the
// error.
func (d *debianImport) apt(ctx context.Context, status io.Writer, args ...string) (string, error) {
	var stdout, stderr capped
	err := d.confined(ctx, confine.Spec{
		Args: args, Env: []string{"APT_CONFIG=" + inCache + "/apt.conf", "TMPDIR=/tmp"},
		Stdout: &stdout, Stderr: &stderr, Status: status,
	}, false, "")
	if err != nil {
		if cerr := context.Cause(ctx); cerr != nil {
			return "", cerr
		}
		return stdout.String(), &aptError{args: args, err: err, says: complaints(stdout.String() + "\n" + stderr.String())}
	}
	return stdout.String(), nil
}

type aptError struct {
	args []string
	err  error
	says []string
}

func (e *aptError) Error() string {
	return fmt.Sprintf("%s %s: %v: %s", e.args[0], e.args[1], e.err, strings.Join(e.says, "; "))
}
func (e *aptError) Unwrap() error { return e.err }

// said is what apt complains about, for people.
func said(err error) string {
	if e, ok := errors.AsType[*aptError](err); ok && len(e.says) > 0 {
		return joinNames(e.says, 3)
	}
	return err.Error()
}

// complaints picks the lines that say what is wrong.
func complaints(out string) []string {
	var says []string
	for line := range strings.SplitSeq(out, "\n") {
		for _, p := range []string{"E: ", "Err:", "dpkg: error", "tar: "} {
			if rest, ok := strings.CutPrefix(line, p); ok {
				says = append(says, strings.TrimSpace(clip(rest)))
			}
		}
	}
	return says
}

// capped keeps the last MiB or so of an output.
type capped struct {
	mu sync.Mutex
	b  []byte // guarded by mu
}

const cappedBytes = 8 << 20

func (c *capped) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.b = append(c.b, p...)
	if over := len(c.b) - cappedBytes; over > cappedBytes/2 {
		c.b = append([]byte(nil), c.b[over:]...)
	}
	return len(p), nil
}

func (c *capped) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return string(c.b)
}

// prepareCache lays out apt's private state.
func (d *debianImport) prepareCache(ctx context.Context) error {
	acquire, err := exec.CommandContext(ctx, "apt-config", "dump").Output()
	if err != nil {
		return fmt.Errorf("ask apt-config: %w", err)
	}
	var conf strings.Builder
	// How this machine reaches its mirrors is its own affair: proxies, time-outs, retries.
	for line := range lines(bytes.NewReader(acquire)) {
		for _, p := range []string{"Acquire::http", "Acquire::https", "Acquire::Retries", "Acquire::ForceIPv"} {
			if strings.HasPrefix(line, p) && !strings.HasSuffix(line, ` "";`) {
				conf.WriteString(line + "\n")
			}
		}
	}
	fmt.Fprintf(&conf, `
Dir::Etc::Parts "%[1]s/empty";
Dir::Etc::Main "/dev/null";
Dir::Etc::SourceList "%[1]s/sources.list";
Dir::Etc::SourceParts "%[1]s/empty";
Dir::Etc::Preferences "/dev/null";
Dir::Etc::PreferencesParts "%[1]s/empty";
Dir::State "%[1]s/state";
Dir::State::lists "%[1]s/lists";
Dir::State::status "%[1]s/state/status";
Dir::Cache "%[1]s/state";
Dir::Cache::archives "%[1]s/archives";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
Dir::Log "%[1]s/state";
APT::Architecture "%[2]s";
APT::Architectures "%[2]s";
APT::Install-Recommends "false";
APT::Sandbox::User "root";
Acquire::Languages "none";
Acquire::GzipIndexes "true";
pkgCacheGen::ForceEssential ",";
`, inCache, d.arch)
	var list strings.Builder
	for _, s := range d.srcs {
		list.WriteString(s.line() + "\n")
	}
	for _, dir := range []string{"", "empty", "state", "lists", "lists/partial", "archives", "archives/partial"} {
		path := filepath.Join(d.cache, dir)
		if err := os.MkdirAll(path, 0o755); err != nil {
			return fmt.Errorf("make package cache: %w", err)
		}
		if err := os.Lchown(path, d.b.idBase, d.b.idBase); err != nil {
			return fmt.Errorf("make package cache: %w", err)
		}
	}
	// Another set of sources makes another index.
	old, err := os.ReadFile(filepath.Join(d.cache, "sources.list"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read package cache: %w", err)
	}
	if string(old) != list.String() {
		if err := os.RemoveAll(filepath.Join(d.cache, "updated")); err != nil {
			return fmt.Errorf("reset package cache: %w", err)
		}
	}
	for name, text := range map[string]string{
		"apt.conf": conf.String(), "sources.list": list.String(), "state/status": "",
	} {
		// Replaced, never followed: the directory belongs to the confined side.
		path := filepath.Join(d.cache, name)
		if err := replaceFile(path, []byte(text)); err != nil {
			return fmt.Errorf("make package cache: %w", err)
		}
	}
	return nil
}

// replaceFile puts a file where the present one, whatever it is, was.
func replaceFile(path string, b []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Chmod(0o644), f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}

// update fetches the index unless it is recent, and says whether it did.
func (d *debianImport) update(ctx context.Context, always bool) (bool, error) {
	mark := filepath.Join(d.cache, "updated")
	if st, err := os.Lstat(mark); err == nil && !always && d.b.now().Sub(st.ModTime()) < indexFresh {
		return false, nil
	}
	d.p.within("resolve", "packages")
	d.p.set(0, 0, "package index")
	if _, err := d.apt(ctx, nil, "apt-get", "--error-on=any", "update"); err != nil {
		if cerr := context.Cause(ctx); cerr != nil {
			return false, cerr
		}
		return false, errdefs.New(errdefs.Unavailable, d.object(), "the package index cannot be fetched: %s", said(err)).
			WithHint("See whether apt-get update works on this machine, then try again").Wrap(err)
	}
	return true, replaceFile(mark, nil)
}

// wanted is what apt is asked to install.
func (d *debianImport) wanted() []string {
	return append([]string{"?essential", "?priority(required)", "apt"}, d.opts.Include...)
}

var (
	instLine = regexp.MustCompile(`(?m)^Inst (\S+) \((\S+) `)
	uriLine  = regexp.MustCompile(`(?m)^'[^']*' (\S+) (\d+) `)
	sizeLine = regexp.MustCompile(`After this operation, ([0-9.,]+) (B|kB|MB|GB) of additional disk space`)
)

// resolve lets apt choose the packages.
func (d *debianImport) resolve(ctx context.Context) (resolved, error) {
	if len(d.opts.Include) > 0 {
		if err := d.known(ctx); err != nil {
			return resolved{}, err
		}
	}
	args := append([]string{"apt-get", "-y", "-s", "install"}, d.wanted()...)
	out, err := d.apt(ctx, nil, args...)
	if err != nil {
		if cerr := context.Cause(ctx); cerr != nil {
			return resolved{}, cerr
		}
		kind := errdefs.FailedPrecondition
		if strings.Contains(said(err), "no installation candidate") || strings.Contains(said(err), "Unable to locate") ||
			strings.Contains(said(err), "was not found") {
			kind = errdefs.NotFound
		}
		return resolved{}, errdefs.New(kind, d.object(), "%s", said(err)).WithField("include", "").
			WithHint("Nothing imported; choose other packages").Wrap(err)
	}
	var set resolved
	for _, m := range instLine.FindAllStringSubmatch(out, -1) {
		set.packages = append(set.packages, m[1]+"="+m[2])
	}
	slices.Sort(set.packages)
	if len(set.packages) == 0 {
		return resolved{}, errdefs.New(errdefs.Unavailable, d.object(), "apt chose no packages").
			WithHint("Import it again with --refresh")
	}
	h := sha256.New()
	fmt.Fprintf(h, "debian/1 %s %s minbase %s\n%s\n", d.opts.Suite, d.arch, strings.Join(d.opts.Include, ","),
		strings.Join(set.packages, "\n"))
	set.id = string(image.FromHash(h))
	// With an empty cache it names every file.
	args = append([]string{"apt-get", "-y", "--print-uris", "-o", "Dir::Cache::archives=" + inCache + "/empty", "install"},
		d.wanted()...)
	if out, err = d.apt(ctx, nil, args...); err != nil {
		return resolved{}, fmt.Errorf("%s: name its files: %w", d.object(), err)
	}
	for _, m := range uriLine.FindAllStringSubmatch(out, -1) {
		size, err := strconv.ParseInt(m[2], 10, 64)
		if err != nil || strings.Contains(m[1], "/") {
			return resolved{}, errdefs.New(errdefs.Internal, d.object(), "apt names a file %q", clip(m[1]))
		}
		set.debs = append(set.debs, deb{m[1], size})
	}
	set.installed = installedSize(out)
	set.epoch = d.indexDate()
	return set, nil
}

func installedSize(out string) int64 {
	m := sizeLine.FindStringSubmatch(out)
	if m == nil {
		return 0
	}
	f, err := strconv.ParseFloat(strings.ReplaceAll(m[1], ",", ""), 64)
	if err != nil {
		return 0
	}
	return int64(f * map[string]float64{"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[m[2]])
}

// indexDate is the newest date of the suite's signed indexes: equal indexes then make equal images.
func (d *debianImport) indexDate() int64 {
	newest := int64(0)
	names, err := filepath.Glob(filepath.Join(d.cache, "lists", "*_InRelease"))
	if err != nil {
		return 0
	}
	for _, name := range names {
		f, err := os.Open(name)
		if err != nil {
			continue
		}
		for line := range lines(f) {
			if v, ok := strings.CutPrefix(line, "Date: "); ok {
				if t, err := time.Parse(time.RFC1123, strings.TrimSpace(v)); err == nil {
					newest = max(newest, t.Unix())
				}
				break
			}
		}
		_ = f.Close()
	}
	return newest
}

// known refuses packages that the suite does not have, with names that resemble them.
func (d *debianImport) known(ctx context.Context) error {
	out, err := d.apt(ctx, nil, "apt-cache", "--all-names", "pkgnames")
	if err != nil {
		return fmt.Errorf("%s: list packages: %w", d.object(), err)
	}
	names := map[string]struct{}{}
	for n := range strings.FieldsSeq(out) {
		names[n] = struct{}{}
	}
	for _, p := range d.opts.Include {
		name := packageName.FindStringSubmatch(p)[1]
		if _, ok := names[name]; ok {
			continue
		}
		e := errdefs.New(errdefs.NotFound, d.object(), "no package %s", name).WithField("include", "")
		if e.Near = near(name, names); len(e.Near) > 0 {
			return e.WithHint("Did you mean %s? Nothing imported", strings.Join(e.Near, " or "))
		}
		return e.WithHint("Nothing imported; choose other packages")
	}
	return nil
}

// near gives up to three of the names at the smallest distance, at most 2.
func near(name string, names map[string]struct{}) []string {
	var out []string
	best := 2
	for n := range names {
		if d := typo.Distance(name, n, best); d <= best {
			if d < best {
				best, out = d, out[:0]
			}
			out = append(out, n)
		}
	}
	slices.SortFunc(out, func(a, b string) int {
		return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b))
	})
	return out[:min(len(out), 3)]
}

// download fetches what the cache lacks.
func (d *debianImport) download(ctx context.Context, set resolved) error {
	var missing int64
	for _, f := range set.debs {
		if st, err := os.Lstat(filepath.Join(d.cache, "archives", f.file)); err != nil || st.Size() != f.size {
			missing += f.size
		}
	}
	// The packages, their copy in the work directory, the tree unpacked there, and the layer.
	var all int64
	for _, f := range set.debs {
		all += f.size
	}
	if err := roomFor(d.b.dir, missing+all+2*set.installed, d.b.limits.Reserve); err != nil {
		return err
	}
	d.p.stage("download", "bytes", missing)
	if missing == 0 {
		return nil
	}
	status := statusWriter{on: func(line string) {
		// dlstatus:<number>:<percent>:<text>
		f := strings.SplitN(line, ":", 4)
		if len(f) != 4 || f[0] != "dlstatus" {
			return
		}
		if pct, err := strconv.ParseFloat(f[2], 64); err == nil && pct >= 0 && pct <= 100 {
			d.p.set(int64(pct/100*float64(missing)), missing, f[3])
		}
	}}
	args := append([]string{"apt-get", "-y", "--download-only", "-o", "APT::Status-Fd=3", "install"}, d.wanted()...)
	if _, err := d.apt(ctx, &status, args...); err != nil {
		if cerr := context.Cause(ctx); cerr != nil {
			return cerr
		}
		return roomErr(d.b.dir, errdefs.New(errdefs.Unavailable, d.object(), "packages cannot be fetched: %s", said(err)).
			WithHint("What came is kept; try again").Wrap(err))
	}
	d.p.set(missing, missing, "")
	return nil
}

// statusWriter cuts a stream into lines.
type statusWriter struct {
	on   func(line string)
	rest []byte
}

func (s *statusWriter) Write(p []byte) (int, error) {
	s.rest = append(s.rest, p...)
	for {
		i := bytes.IndexByte(s.rest, '\n')
		if i < 0 {
			if len(s.rest) > 64<<10 {
				s.rest = nil // no line of ours
			}
			return len(p), nil
		}
		s.on(strings.TrimRight(string(s.rest[:i]), "\r"))
		s.rest = s.rest[i+1:]
	}
}

// The hooks run inside, with the new root as $1: the index and the packages come from the cache, and what tells of this
// machine goes.
const (
	setupHook = `set -e
mkdir -p "$1/var/lib/apt/lists" "$1/var/cache/apt/archives"
find ` + inCache + `/lists -maxdepth 1 -type f ! -name lock -exec cp -t "$1/var/lib/apt/lists" {} +
cd ` + inCache + `/archives && xargs -r -a ` + inWork + `/debs cp -t "$1/var/cache/apt/archives"`
	customizeHook = `cd "$1"
rm -f etc/dpkg/dpkg.cfg.d/99mmdebstrap etc/resolv.conf etc/hostname etc/machine-id var/lib/dbus/machine-id`
)

// install makes the root file system and reads its tar as it comes.
func (d *debianImport) install(ctx context.Context, set resolved) (_ Result, err error) {
	work, err := os.MkdirTemp(d.b.tmp(), "debian-")
	if err != nil {
		return Result{}, fmt.Errorf("%s: %w", d.object(), err)
	}
	defer func() {
		if rerr := os.RemoveAll(work); rerr != nil {
			err = errors.Join(err, fmt.Errorf("remove %s: %w", work, rerr))
		}
	}()
	var names strings.Builder
	for _, f := range set.debs {
		names.WriteString(f.file + "\n")
	}
	if err := os.WriteFile(filepath.Join(work, "debs"), []byte(names.String()), 0o644); err != nil {
		return Result{}, err
	}
	if err := os.Lchown(work, d.b.idBase, d.b.idBase); err != nil {
		return Result{}, err
	}
	args := []string{
		"mmdebstrap", "--mode=unshare", "--variant=minbase", "--format=tar", "--verbose", "--skip=update",
		"--architectures=" + d.arch, "--setup-hook=" + setupHook, "--customize-hook=" + customizeHook,
		"--dpkgopt=force-unsafe-io", // of files that are thrown away; the hook takes the option out again
	}
	if len(d.opts.Include) > 0 {
		args = append(args, "--include="+strings.Join(d.opts.Include, ","))
	}
	args = append(args, d.opts.Suite, "-")
	for _, s := range d.srcs {
		args = append(args, s.line())
	}
	total := int64(len(set.packages))
	d.p.stage("unpack", "packages", total)
	used, done, err := d.b.turn(ctx, d.p)
	if err != nil {
		return Result{}, err
	}
	defer done()
	var text capped
	var once sync.Once
	configured := int64(0)
	watch := statusWriter{on: func(line string) {
		switch {
		case strings.HasPrefix(line, "Setting up "):
			configured++
			name, _, _ := strings.Cut(strings.TrimPrefix(line, "Setting up "), " ")
			d.p.set(min(configured, total), total, name)
		case strings.HasPrefix(line, "I: creating tarball"):
			once.Do(func() { d.p.stage("write", "bytes", set.installed) })
		}
	}}
	pr, pw, err := os.Pipe()
	if err != nil {
		return Result{}, err
	}
	defer func() { _ = pr.Close() }()
	rctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	ran := make(chan error, 1)
	go func() {
		defer func() { _ = pw.Close() }()
		ran <- d.confined(rctx, confine.Spec{
			Args: args, Stdout: pw, Stderr: io.MultiWriter(&text, &watch),
			Env: []string{"TMPDIR=" + inWork, "SOURCE_DATE_EPOCH=" + strconv.FormatInt(set.epoch, 10)},
		}, true, work)
	}()
	// The stage begins when mmdebstrap says so, or else with the first bytes.
	count := func(n int64) {
		once.Do(func() { d.p.stage("write", "bytes", set.installed) })
		d.p.add(n)
	}
	l, terr := d.b.tarLayer(ctx, pr, tarReader{archive: d.object(), used: used}, count)
	if terr != nil {
		stop(terr)
	}
	_ = pr.Close()
	rerr := <-ran
	switch {
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case rerr != nil && (terr == nil || errors.Is(terr, errdefs.Invalid)):
		// The tar is cut off because its maker failed.
		says := complaints(text.String())
		err = errdefs.New(errdefs.FailedPrecondition, d.object(), "mmdebstrap failed: %s", joinNames(says, 3)).
			WithHint("Nothing imported; the log of sandsea up has its last words").Wrap(rerr)
		d.b.log.Warn("mmdebstrap failed", "suite", d.opts.Suite, "err", rerr, "output", tail(text.String(), 4000))
	default:
		err = terr
	}
	if err != nil {
		if l != nil {
			err = errors.Join(err, l.data.Abort())
		}
		return Result{}, roomErr(d.b.dir, err)
	}
	layers, err := d.b.commit(ctx, []*layer{l}, d.opts.name())
	if err != nil {
		return Result{}, err
	}
	return Result{
		Name: d.opts.name(), Layers: layers, Config: defaultConfig(), Packages: set.id, Notes: used.notes(),
	}, nil
}

func tail(s string, n int) string { return s[max(len(s)-n, 0):] }

// trim keeps the package cache within its bound: the packages of this import and then the most recent stay.
func (d *debianImport) trim(set resolved) error {
	type file struct {
		path string
		size int64
		at   time.Time
	}
	dirs, err := filepath.Glob(filepath.Join(d.b.dir, "cache", "debian", "*", "archives"))
	if err != nil {
		return err
	}
	now := d.b.now()
	for _, f := range set.debs {
		_ = os.Chtimes(filepath.Join(d.cache, "archives", f.file), now, now)
	}
	var files []file
	var total int64
	for _, dir := range dirs {
		ents, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, e := range ents {
			if st, err := e.Info(); err == nil && st.Mode().IsRegular() && strings.HasSuffix(e.Name(), ".deb") {
				files = append(files, file{filepath.Join(dir, e.Name()), st.Size(), st.ModTime()})
				total += st.Size()
			}
		}
	}
	slices.SortFunc(files, func(a, b file) int { return a.at.Compare(b.at) })
	for _, f := range files {
		if total <= cacheBytes {
			return nil
		}
		if err := os.Remove(f.path); err != nil {
			return err
		}
		total -= f.size
	}
	return nil
}
