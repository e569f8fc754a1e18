"""The `anabranch` command. Importing a module here stays cheap: what a command needs it imports
when it runs, so that `anabranch --help` answers at once. Never imports torch.
"""
