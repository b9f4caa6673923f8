package packages

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/server"
)

// toolkit is a package client of this machine, made a layer when the first test asks for it.
type toolkit struct {
	name string
	// find tells what goes in, by where it is to lie; an error says that this machine lacks it.
	find func(ctx context.Context) ([]tree, error)
	// probe is a line that works inside if the client does: the image may lack a library of this machine.
	probe string
	once  sync.Once
	err   error
}

// tree is a file or a folder of this machine.
type tree struct {
	from string
	to   string // absolute; empty: the same
	skip func(path string) bool
}

// errMissing: this machine has no such client, or one that does not run in the image.
var errMissing = errors.New("no client of this machine runs in the image")

// use makes the toolkit on the shared server and gives its name.
func (k *toolkit) use(t testing.TB) string {
	t.Helper()
	s := serve(t)
	k.once.Do(func() {
		if k.err = k.make(t, s); k.err != nil {
			return
		}
		if out, code := open(t, nil, k.name).try(k.probe); code != 0 {
			k.err = fmt.Errorf("%w: %s: %s", errMissing, k.probe, out)
		}
	})
	k.need(t, k.err)
	return k.name
}

// useOn makes the toolkit on another server, of the same image, and gives its name.
func (k *toolkit) useOn(t testing.TB, s *server.Server) string {
	t.Helper()
	k.use(t)
	k.need(t, k.make(t, s))
	return k.name
}

func (k *toolkit) need(t testing.TB, err error) {
	t.Helper()
	if errors.Is(err, errMissing) {
		require.That(t, k.name, err)
	}
	if err != nil {
		t.Fatalf("toolkit %s: %v", k.name, err)
	}
}

func (k *toolkit) make(t testing.TB, s *server.Server) error {
	trees, err := k.find(t.Context())
	if err != nil {
		return fmt.Errorf("%w: %w", errMissing, err)
	}
	ctx, stop := context.WithTimeoutCause(t.Context(), imageLimit, errors.New("making the toolkit took too long"))
	defer stop()
	r, w := io.Pipe()
	go func() { w.CloseWithError(pack(w, trees)) }()
	up, err := s.Client.UploadImage(ctx, r)
	_ = r.CloseWithError(err) // ends the packing if it is not over
	if err != nil {
		return err
	}
	_, _, err = s.Client.ImportImage(ctx, archive(k.name, up), nil)
	return err
}

var (
	goKit = &toolkit{name: "go", probe: goEnv + "go version", find: func(ctx context.Context) ([]tree, error) {
		root, err := said(ctx, "go", "env", "GOROOT")
		if err != nil {
			return nil, err
		}
		var trees []tree
		for _, name := range []string{"VERSION", "go.env", "bin/go", "pkg/include", "pkg/tool", "src", "lib/time"} {
			trees = append(trees, tree{from: filepath.Join(root, name), to: "/usr/local/go/" + name, skip: func(path string) bool {
				return strings.HasSuffix(path, "_test.go") || filepath.Base(path) == "testdata"
			}})
		}
		return trees, nil
	}}
	nodeKit = &toolkit{name: "node", probe: "node --version && npm --version", find: func(context.Context) ([]tree, error) {
		trees, err := programs("node", "npm")
		if err != nil {
			return nil, err
		}
		cli, err := filepath.EvalSymlinks(trees[1].from) // FOLDER/npm/bin/npm-cli.js
		if err != nil {
			return nil, err
		}
		home := filepath.Dir(filepath.Dir(cli))
		if filepath.Base(filepath.Dir(home)) != "node_modules" {
			home = filepath.Dir(home) // Debian's, with its dependencies beside it
		}
		return append(trees, tree{from: home}), nil
	}}
	cargoKit = &toolkit{name: "cargo", probe: "cargo --version && rustc --version", find: func(ctx context.Context) ([]tree, error) {
		root, err := said(ctx, "rustc", "--print", "sysroot")
		if err != nil {
			return nil, err
		}
		skip := func(path string) bool { return strings.HasSuffix(path, ".rlib") }
		return []tree{
			{from: filepath.Join(root, "bin/cargo"), to: "/usr/local/bin/cargo"},
			{from: filepath.Join(root, "bin/rustc"), to: "/usr/local/bin/rustc"},
			{from: filepath.Join(root, "lib"), to: "/usr/local/lib", skip: skip},
		}, nil
	}}
	mavenKit = &toolkit{name: "maven", probe: "mvn -v", find: func(ctx context.Context) ([]tree, error) {
		trees, err := programs("mvn", "java")
		if err != nil {
			return nil, err
		}
		about, err := said(ctx, "mvn", "-v")
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(about) {
			if home, ok := strings.CutPrefix(strings.TrimSpace(line), "Maven home: "); ok {
				trees = append(trees, tree{from: home})
			}
			if _, home, ok := strings.Cut(strings.TrimSpace(line), "runtime: "); ok {
				trees = append(trees, tree{from: home, skip: func(path string) bool {
					return slices.Contains([]string{"jmods", "src.zip", "lib/src.zip", "classes.jsa", "classes_nocoops.jsa"}, filepath.Base(path))
				}})
			}
		}
		return trees, nil
	}}
)

func said(ctx context.Context, program string, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, program, args...).Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w", program, err)
	}
	return strings.TrimSpace(string(out)), nil
}

// programs finds programs in PATH.
func programs(names ...string) (out []tree, err error) {
	for _, name := range names {
		path, err := exec.LookPath(name)
		if err != nil {
			return nil, err
		}
		out = append(out, tree{from: path})
	}
	return out, nil
}

// pack writes an archive of trees, and of what their symbolic links lead to.
func pack(w io.Writer, trees []tree) error {
	a := &packer{w: tar.NewWriter(w), done: map[string]bool{"/": true}}
	for len(trees) > 0 {
		more, err := a.add(trees[0])
		if err != nil {
			return err
		}
		trees = append(trees[1:], more...)
	}
	return a.w.Close()
}

type packer struct {
	w    *tar.Writer
	done map[string]bool // by where it lies
}

// add packs a tree and gives what its links lead to.
func (a *packer) add(t tree) (more []tree, err error) {
	to := t.to
	if to == "" {
		to = t.from
	}
	return more, filepath.WalkDir(t.from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if t.skip != nil && t.skip(path) {
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		at := filepath.Join(to, strings.TrimPrefix(path, t.from))
		if err := a.parents(filepath.Dir(at)); err != nil || a.done[at] {
			return err
		}
		a.done[at] = true
		info, err := d.Info()
		if err != nil {
			return err
		}
		link := ""
		if d.Type() == fs.ModeSymlink {
			if link, err = os.Readlink(path); err != nil {
				return err
			}
			target := link
			if !filepath.IsAbs(target) {
				target = filepath.Join(filepath.Dir(path), target)
			}
			if _, err := os.Lstat(target); err == nil {
				more = append(more, tree{from: target})
			}
		} else if !d.IsDir() && !info.Mode().IsRegular() {
			return nil
		}
		h, err := tar.FileInfoHeader(info, link)
		if err != nil {
			return err
		}
		h.Name, h.Uid, h.Gid, h.Uname, h.Gname = strings.TrimPrefix(at, "/"), 0, 0, "", ""
		if d.IsDir() {
			h.Name += "/"
		}
		if err := a.w.WriteHeader(h); err != nil {
			return err
		}
		if h.Typeflag != tar.TypeReg {
			return nil
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = io.Copy(a.w, f)
		return err
	})
}

// parents packs the folders above an entry, plain ones.
func (a *packer) parents(dir string) error {
	if a.done[dir] {
		return nil
	}
	if err := a.parents(filepath.Dir(dir)); err != nil {
		return err
	}
	a.done[dir] = true
	return a.w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: strings.TrimPrefix(dir, "/") + "/", Mode: 0o755})
}
