"""The systems that engineers would use instead, each behind one interface: `base.Peer`."""
