package ui

import (
	"fmt"
	"os"
)

// KeepOutPrivate makes the file that standard output is, if it is one, its owner's alone: for secrets. The shell made it,
// as readable as it makes all others.
func (s *IO) KeepOutPrivate() error {
	o, ok := s.Out.(*output)
	if !ok {
		return nil
	}
	f, ok := o.w.(*os.File)
	if !ok {
		return nil
	}
	if fi, err := f.Stat(); err != nil || !fi.Mode().IsRegular() {
		return nil //nolint:nilerr // what is no file has no readers of its own
	}
	if err := f.Chmod(0o600); err != nil {
		return fmt.Errorf("keep standard output private: %w", err)
	}
	return nil
}
