/* SPDX-License-Identifier: Apache-2.0 */
/*
 * files_wire.h - messages between the edge and a file helper, over SOCK_SEQPACKET.
 *
 * One request, one answer, in order; many may be in flight. A request is struct fw_request, then the bytes of path,
 * then those of path2; no bytes end them and none of them is NUL. An answer is struct fw_answer, then data_len bytes,
 * with at most one descriptor. All numbers are little-endian. The other end is internal/chronus/files/wire.go; its
 * test reads the numbers below out of this file.
 *
 * A path is looked up below "/" of the sandbox, or, with a base, below that open directory and never out of it.
 */
#ifndef SANDSEA_FILES_WIRE_H
#define SANDSEA_FILES_WIRE_H

#include <stdint.h>

#define FW_MAGIC 0x31574653u /* "SFW1" */
#define FW_PATH_MAX 4096u    /* bytes of one path */
#define FW_DATA_MAX 65536u   /* bytes after an answer */
#define FW_HANDLES 128u      /* open directories and unfinished files of one helper */
#ifndef FW_IDLE_MS
#define FW_IDLE_MS 30000     /* a helper without requests and handles ends */
#endif
#define FW_PSEUDO_MAX 16777216u /* bytes of a file of /proc and the like */

/* Operations. */
#define FW_STAT 1u     /* path; NOFOLLOW -> stat, data = target of a link */
#define FW_OPEN 2u     /* path; NOFOLLOW, NOSYMLINKS -> stat, descriptor of a regular file, open for reading */
#define FW_CREATE 3u   /* path, mode = that of new parents; NOFOLLOW, PARENTS -> handle, descriptor to write to */
#define FW_COMMIT 4u   /* handle, mode, uid, gid, mtime; SET_*, DEFAULT_MODE -> stat. The handle is gone in any case */
#define FW_CLOSE 5u    /* handle: an unfinished file vanishes */
#define FW_DIR 6u      /* path; NOFOLLOW, NOSYMLINKS, PATHONLY (as a base only) -> handle, stat */
#define FW_NEXT 7u     /* handle -> count entries in data; 0: the end, and the handle is gone */
#define FW_MKDIR 8u    /* path, mode; PARENTS -> DID if it was made */
#define FW_RENAME 9u   /* path to path2 */
#define FW_UNLINK 10u  /* path: a file or an empty directory */
#define FW_RMTREE 11u  /* path -> MORE: ask again; count = entries seen. On an error data = the name that stays */
#define FW_SETATTR 12u /* path, mode, uid, gid, mtime; SET_*, NOFOLLOW */
#define FW_SYMLINK 13u /* path, path2 = target; REPLACE */
#define FW_LINK 14u    /* path = new name, path2 = the file; REPLACE */
#define FW_WATCH 15u   /* -> handle, descriptor of a new inotify instance */
/* handle of a watch, path, path2 = a name in it or nothing, ino of path or 0 -> stat, count = its number in the instance.
 * NOFOLLOW, NOSYMLINKS, DIRECTORY, NAMES. PSEUDO: nothing would tell, and nothing was done. ESTALE: ino is another. */
#define FW_ADD 16u
#define FW_UNWATCH 17u /* handle of a watch, mode = the number */

/* Flags of a request. */
#define FW_NOFOLLOW 0x1u     /* a symbolic link in the last place is meant itself */
#define FW_NOSYMLINKS 0x2u   /* no symbolic link in any place */
#define FW_PARENTS 0x4u      /* missing parents are made */
#define FW_PATHONLY 0x8u
#define FW_REPLACE 0x10u     /* what is there and is no directory goes */
#define FW_SET_MODE 0x20u
#define FW_SET_OWNER 0x40u
#define FW_SET_MTIME 0x80u
#define FW_DEFAULT_MODE 0x100u /* mode is for a new file; an old one keeps its own, and its owner where allowed */
#define FW_DIRECTORY 0x200u    /* SETATTR, ADD: anything but a directory is refused */
#define FW_NAMES 0x400u        /* ADD: only what goes from the directory and what comes in */

/* Flags of an answer. */
#define FW_MORE 0x1u
#define FW_DID 0x2u
#define FW_NOT_A_FILE 0x4u /* with an error: it is a pipe, device or socket; stat tells */
#define FW_PSEUDO 0x8u     /* on /proc or the like; the descriptor is a copy in memory */

struct fw_request {
	uint32_t magic;
	uint32_t op;
	uint64_t cookie;
	uint32_t flags;
	uint32_t base; /* 0: the sandbox's root */
	uint32_t handle;
	uint32_t mode;
	uint32_t uid;
	uint32_t gid;
	int64_t mtime_sec;
	uint32_t mtime_nsec;
	uint16_t path_len;
	uint16_t path2_len;
	uint64_t ino;
};

struct fw_stat {
	uint32_t mode; /* with the type */
	uint32_t uid;
	uint32_t gid;
	uint32_t nlink;
	uint64_t ino;
	uint64_t dev;
	int64_t size;
	int64_t mtime_sec;
	uint32_t mtime_nsec;
	uint32_t reserved;
};

struct fw_answer {
	uint32_t magic;
	uint32_t op;
	uint64_t cookie;
	int32_t error; /* errno or 0 */
	uint32_t flags;
	uint32_t handle;
	uint32_t count;
	uint32_t data_len;
	uint32_t reserved;
	struct fw_stat stat;
};

/* One entry of a directory, followed by its name and, for a symbolic link, its target. */
struct fw_entry {
	struct fw_stat stat;
	uint16_t name_len;
	uint16_t link_len;
	uint32_t reserved;
};

_Static_assert(sizeof(struct fw_request) == 64, "request");
_Static_assert(sizeof(struct fw_stat) == 56, "stat");
_Static_assert(sizeof(struct fw_answer) == 96, "answer");
_Static_assert(sizeof(struct fw_entry) == 64, "entry");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "byte order");

#endif
