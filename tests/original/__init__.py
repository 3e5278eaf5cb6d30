"""Entry scripts as users of CPM-Pretrain have them: they use only names, calls and flags of CPM-Pretrain."""
