"""The commands of this package: python -m training."""

COMMANDS = """\
training/run_ddp.sh 2 --dataset sample --model tiny   train with two processes (--help lists the flags)
python training/train_single.py --dataset sample      train with one
python -m training.data_report DATA                   what to know of data before training on it
python -m training.evaluate MODEL                     evaluate a model on test rows
python -m training.watch OUTPUT_DIR.run               watch a run, or compare several
python -m training.search SPACE.yaml                  find better hyperparameters with many runs
python -m training.planning --help                    plan a run on hardware that you do not have
python -m training.publish_model MODEL --name NAME    publish a model on the hub
python -m learn.cards show                         a run in twelve visible steps
python -m learn.check data_parallel my_solution.py       check your own data parallelism
"""

print(COMMANDS, end="")
