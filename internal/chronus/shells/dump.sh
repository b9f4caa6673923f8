# Tells the state of a POSIX shell, which cannot list its functions.
\command echo '@TOKEN@ cwd'
\command pwd
\command echo '@TOKEN@ umask'
\command umask
\command echo '@TOKEN@ set'
\command set
\command echo '@TOKEN@ export'
\command export -p
\command echo '@TOKEN@ readonly'
\command readonly -p
\command echo '@TOKEN@ options'
\command set +o
\command echo '@TOKEN@ end'
