/* SPDX-License-Identifier: Apache-2.0 */
/*
 * files.h - the file helper.
 *
 * serve_files runs in a child of PID 1 that already has the asked user's ids, groups and capabilities, the seccomp
 * filter, umask 022, cwd / and no descriptor but 0 to 2 (empty) and sock, a SOCK_SEQPACKET socket. It returns when it
 * is done; its result becomes the child's exit code, which nobody reads.
 */
#ifndef SANDSEA_FILES_H
#define SANDSEA_FILES_H

int serve_files(int sock);

#endif
