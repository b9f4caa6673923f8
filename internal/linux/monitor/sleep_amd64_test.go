package monitor

const nanosleep = "35 "
