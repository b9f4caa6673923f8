package upper

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/sandsea/sandsea/internal/linux/dirfd"
	"github.com/sandsea/sandsea/internal/linux/projquota"
)

// projects keeps volumes as plain directories, limited by project quota: XFS, or ext4 with the feature "project".
//
// A volume in the trash counts until it is removed, while the ids of its sandbox may be another's already. So the number
// of its project is one of those ids, of which each sandbox has many, that no other volume has, whichever place it is in.
type projects struct {
	dir   *os.File
	path  string
	quota quotas
	own   uint32 // the project that dir itself is in, 0: none

	mu   sync.Mutex
	used map[uint32]int // guarded by mu: how many volumes a project has; before this version two could have the same
}

// quotas are what the kernel does with projects; a test has others.
type quotas interface {
	Set(fs *os.File, project uint32, l projquota.Limits) error
	Usage(fs *os.File, project uint32) (int64, projquota.Limits, error)
	Mark(dir *os.File, project uint32) error
	Project(f *os.File) (uint32, error)
}

// A volume may hold as many files as mkfs.ext4 makes for its size, but some in any case.
const (
	bytesPerInode = 16 << 10
	leastInodes   = 16 << 10
)

type kernelQuotas struct{}

func (kernelQuotas) Set(fs *os.File, project uint32, l projquota.Limits) error {
	return projquota.Set(fs, project, l)
}

func (kernelQuotas) Usage(fs *os.File, project uint32) (int64, projquota.Limits, error) {
	return projquota.Usage(fs, project)
}

func (kernelQuotas) Mark(dir *os.File, project uint32) error { return projquota.Mark(dir, project) }

func (kernelQuotas) Project(f *os.File) (uint32, error) { return projquota.Project(f) }

func openProjects(disk string, q quotas) (_ volumes, err error) {
	path := filepath.Join(disk, dirName)
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	dir, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			dir.Close()
			os.Remove(path) // unless there is something in it
		}
	}()
	p := &projects{dir: dir, path: path, quota: q, used: map[uint32]int{}}
	if p.own, err = q.Project(dir); err != nil {
		return nil, err
	}
	return p, p.find()
}

// find notes the projects of the volumes that there are.
func (p *projects) find() error {
	for _, place := range [...]string{".", "pool", "live", "trash"} {
		dir, err := dirfd.Open(p.dir, place)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		err = p.findIn(dir)
		dir.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

func (p *projects) findIn(dir *os.File) error {
	names, err := dirfd.Names(dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		if name == "pool" || name == "live" || name == "trash" {
			continue
		}
		id, err := p.projectOf(dir, name)
		if err != nil {
			return err
		}
		if id != 0 {
			p.used[id]++
		}
	}
	return nil
}

func (p *projects) mechanism() string { return "project quota" }

func (p *projects) root() *os.File { return p.dir }

func (p *projects) create(dir *os.File, name string) error {
	if err := dirfd.Mkdir(dir, name, 0o700); err != nil {
		return err
	}
	return fill(dir, name)
}

func (p *projects) limit(volume *os.File, bytes int64, first uint32) error {
	if first == 0 {
		return errors.New("project 0 has no limit")
	}
	id, err := p.project(volume)
	if err != nil {
		return err
	}
	if id != 0 {
		return p.set(volume, bytes, id)
	}
	if id, err = p.claim(first); err != nil {
		return err
	}
	if err = p.set(volume, bytes, id); err == nil {
		err = p.mark(volume, id)
	}
	if err != nil {
		if got, _ := p.project(volume); got != id { // else it is given back with the volume
			p.unclaim(id)
		}
	}
	return err
}

// claim takes a number that no volume has.
func (p *projects) claim(first uint32) (uint32, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id := first; id-first < idRange; id++ {
		if p.used[id] == 0 {
			p.used[id] = 1
			return id, nil
		}
	}
	return 0, fmt.Errorf("all projects from %d on are of layers that are not gone yet", first)
}

// unclaim gives the number of one volume back.
func (p *projects) unclaim(id uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.used[id]--; p.used[id] <= 0 {
		delete(p.used, id)
	}
}

func (p *projects) set(volume *os.File, bytes int64, id uint32) error {
	// Empty files cost no bytes, but the file system's inodes, which are everybody's.
	l := projquota.Limits{Bytes: bytes, Inodes: max(bytes/bytesPerInode, leastInodes)}
	if err := p.quota.Set(volume, id, l); err != nil {
		return err
	}
	_, got, err := p.quota.Usage(volume, id)
	if err != nil {
		return err
	}
	if got.Bytes < bytes || got.Bytes > bytes+1024 {
		return fmt.Errorf("a limit of %d became one of %d", bytes, got.Bytes)
	}
	if got.Inodes != l.Inodes {
		return fmt.Errorf("a limit of %d files became one of %d", l.Inodes, got.Inodes)
	}
	return nil
}

// mark marks both directories, since overlayfs renames from one to the other, which needs the same project.
func (p *projects) mark(volume *os.File, id uint32) error {
	for _, name := range [...]string{upperName, workName} {
		d, err := dirfd.Open(volume, name)
		if err != nil {
			return err
		}
		err = p.quota.Mark(d, id)
		d.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// project is that of a volume; 0 if it has none of its own. All that is left of a volume whose removal was cut off is in
// its project.
func (p *projects) project(volume *os.File) (uint32, error) {
	d, err := dirfd.Open(volume, upperName)
	if errors.Is(err, os.ErrNotExist) {
		names, nerr := dirfd.Names(volume)
		if nerr != nil || len(names) == 0 {
			return 0, nerr
		}
		d, err = dirfd.Open(volume, names[0])
	}
	if err != nil {
		return 0, err
	}
	defer d.Close()
	id, err := p.quota.Project(d)
	if id == p.own {
		id = 0
	}
	return id, err
}

// projectOf is project for the volume of a name.
func (p *projects) projectOf(dir *os.File, name string) (uint32, error) {
	vol, err := dirfd.Open(dir, name)
	if err != nil {
		return 0, err
	}
	defer vol.Close()
	return p.project(vol)
}

func (p *projects) usage(volume *os.File) (int64, error) {
	id, err := p.project(volume)
	if err != nil {
		return 0, err
	}
	used, _, err := p.quota.Usage(volume, id)
	return used, err
}

// renew is false: a new volume is two directories.
func (p *projects) renew(*os.File, string) (bool, error) { return false, nil }

func (p *projects) destroy(dir *os.File, name string) error {
	id, err := p.projectOf(dir, name)
	if err != nil {
		return err
	}
	// What a sandbox wrote is as deep as it likes, and never walked by path.
	if err := dirfd.RemoveTree(dir, name); err != nil {
		return err
	}
	if id == 0 {
		return nil
	}
	p.mu.Lock()
	last := p.used[id] <= 1
	p.mu.Unlock()
	if last { // first the limit, then the number, which somebody may take at once
		if err := p.quota.Set(p.dir, id, projquota.Limits{}); err != nil {
			return err
		}
	}
	p.unclaim(id)
	return nil
}

func (p *projects) collect() bool { return false }

func (p *projects) full(err error) bool { return projquota.Full(err) }

func (p *projects) close() error { return p.dir.Close() }

func (p *projects) remove() error { return os.RemoveAll(p.path) }
