package upper

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/sandsea/sandsea/internal/linux/dirfd"
	"github.com/sandsea/sandsea/internal/linux/projquota"
)

// projects keeps volumes as plain directories, limited by project quota: XFS, or ext4 with the feature "project".
type projects struct {
	dir  *os.File
	path string
}

func openProjects(disk string) (volumes, error) {
	path := filepath.Join(disk, dirName)
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	dir, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	return &projects{dir: dir, path: path}, nil
}

func (p *projects) mechanism() string { return "project quota" }

func (p *projects) root() *os.File { return p.dir }

func (p *projects) create(dir *os.File, name string) error {
	if err := dirfd.Mkdir(dir, name, 0o700); err != nil {
		return err
	}
	return fill(dir, name)
}

// limit marks both directories, since overlayfs renames from one to the other, which needs the same project.
func (p *projects) limit(volume *os.File, bytes int64, project uint32) error {
	if project == 0 {
		return errors.New("project 0 has no limit")
	}
	if err := projquota.Set(volume, project, projquota.Limits{Bytes: bytes}); err != nil {
		return err
	}
	_, got, err := projquota.Usage(volume, project)
	if err != nil {
		return err
	}
	if got.Bytes < bytes || got.Bytes > bytes+1024 {
		return fmt.Errorf("a limit of %d became one of %d", bytes, got.Bytes)
	}
	for _, name := range [...]string{workName, upperName} {
		d, err := dirfd.Open(volume, name)
		if err != nil {
			return err
		}
		err = projquota.Mark(d, project)
		d.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

func (p *projects) project(volume *os.File) (uint32, error) {
	d, err := dirfd.Open(volume, upperName)
	if err != nil {
		return 0, err
	}
	defer d.Close()
	return projquota.Project(d)
}

func (p *projects) usage(volume *os.File) (int64, error) {
	id, err := p.project(volume)
	if err != nil {
		return 0, err
	}
	used, _, err := projquota.Usage(volume, id)
	return used, err
}

func (p *projects) destroy(dir *os.File, name string) error {
	vol, err := dirfd.Open(dir, name)
	if err != nil {
		return err
	}
	id, err := p.project(vol)
	vol.Close()
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	// What a sandbox wrote is never walked by path: os.Root follows no link out of it.
	root, err := os.OpenRoot(dir.Name())
	if err != nil {
		return err
	}
	defer root.Close()
	if err := root.RemoveAll(name); err != nil {
		return err
	}
	if id == 0 {
		return nil
	}
	return projquota.Set(p.dir, id, projquota.Limits{})
}

func (p *projects) collect() bool { return false }

func (p *projects) full(err error) bool { return projquota.Full(err) }

func (p *projects) close() error { return p.dir.Close() }

func (p *projects) remove() error { return os.RemoveAll(p.path) }
