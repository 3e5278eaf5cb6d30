"""Scripts and flags of other frameworks: adapters around the core, which names this package in one place only.

flags/          flags and configuration keys of other frameworks: their translation to settings, or their refusal
names.py        modules and names of CPM-Pretrain, and where this project has them or what replaces them
script.py       the task of CPM-Pretrain's scripts, which `pretrain()` runs
args.py         `get_args()`: the settings, with attributes that CPM-Pretrain has but this project's settings lack
models.py       models that read `get_args()` and accept attention masks; pipes.py has them as pipelines
masks.py        attention masks, and their conversion to the equivalent document ids
data.py         data sets with CPM-Pretrain's arguments and sample keys
transformer.py  building blocks of CPM-Pretrain's models
fp16.py         conversions of nested tensors
"""
