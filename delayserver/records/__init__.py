"""What is written: messages, ids, subjects, subscriptions, and the tables of the catalog. Pure
values, and how each is packed and parsed."""
