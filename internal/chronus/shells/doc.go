// Package shells owns the shell sessions of one sandbox: their names, their turns, and the state that goes from one
// command of a session to the next.
//
// Each command is a new shell, a command of the sandbox like any other: it has a number, a time limit, recorded output,
// and its status is what sandsea-init's wait told, which nothing inside can forge. It reads its program (the state from
// before, then the script) from one file in memory and leaves its state in another, whose size the kernel bounds. Both
// files belong to the command's user and are handed over as O_PATH descriptors: what inherits them without being that
// user can neither read nor write them. What comes back is untrusted. It is checked for size and form, and only ever
// fed to a shell that runs in the same sandbox as the same user.
//
// State that is missing, incomplete or malformed is lost: the session stays as it was before the command. It is
// remembered before the command's result is, and the keeper holds the file meanwhile, so that sessions survive a killed
// edge, and a command that was under way hands its state to the next one.
//
// All methods may be called at once. Commands of one session run one at a time, in the order of their calls.
package shells
