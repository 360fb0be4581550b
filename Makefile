# For hands that type make: the words themselves are in ./dev.
.PHONY: run demo test bench
run demo test bench:
	./dev $@ $(ARGS)
