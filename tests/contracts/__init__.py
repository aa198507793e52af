"""The plugins that come with memstore, each through the kit that third parties use."""
