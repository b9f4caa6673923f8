// Package attacks holds what hostile code, hostile images and hostile tenants try, as tests: each runs the attack inside
// a real sandbox of a real server and shows that it stays there, that its neighbours go on, and that the platform still
// works afterwards. docs/SECURITY.md says which class of attack each test stands for.
//
// The attacks themselves are in testdata/attack.c, which is built on the fly and lies in the image as /bin/attack. It
// judges nothing; what must not work is said here.
package attacks
