# make lab: JupyterLab on the notebooks    make run: every notebook headless    make site: pages of them in build/site
# make test: the tests, without those that are marked slow
PYTHON ?= python3
BIN := .venv/bin
SETUP := .venv/installed

.PHONY: run site test lab lint strip clean

run: $(SETUP)
	$(BIN)/python -m madmax_lib run

site: $(SETUP)
	$(BIN)/python -m madmax_lib site

test: $(SETUP)
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations=40 -m "not slow"

lab: $(SETUP)
	$(BIN)/jupyter lab --notebook-dir=notebooks

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m nbstripout --verify $(STRIP) notebooks/*.ipynb

strip: $(SETUP)
	$(BIN)/python -m nbstripout $(STRIP) notebooks/*.ipynb

# what a run leaves in a notebook beside outputs
STRIP := --extra-keys "metadata.papermill metadata.language_info.version cell.metadata.papermill cell.metadata.execution"

$(SETUP): requirements.txt .ci/constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r requirements.txt -c .ci/constraints.txt
	touch $@

clean:
	rm -rf .venv build .pytest_cache .ruff_cache .hypothesis *.egg-info
