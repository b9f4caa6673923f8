package wire

import "github.com/sandsea/sandsea/api/errdefs"

// knowsShells refuses for an inside that was made before there were shell sessions: what it does not know ends it.
func (c *Channel) knowsShells(object string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dead != nil {
		return c.dead
	}
	if !c.shells {
		return errdefs.New(errdefs.FailedPrecondition, object, "was made by an older version, without shell sessions").
			WithHint("Create a new sandbox, or run commands without a session")
	}
	return nil
}
