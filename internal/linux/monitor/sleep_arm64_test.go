package monitor

const nanosleep = "101 "
