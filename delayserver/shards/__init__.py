"""Whose it is: several shards behind one address. Each answers for all of them. In reading order:

place        where a process stands among others
book         who owns each shard of a cluster, as far as this process was told
sealed       the bytes between two machines: a proof, then sealed records
meeting      where each shard listens, and how it gets to another one
link         one kept connection between each two shards
peers        a call of one shard to another: a whole call, whose caller was checked
local        the own shard, as other shards ask it
front        a call that comes in goes to the shard that it belongs to
all_shards   all of them asked at the same time, and their answers taken together
merged_lists  lists of all shards as one list
merged_subscriptions  subscriptions, with the rows that wait in all shards
merged_backups  backups, of which each shard makes its part
many_cancels  a cancel of messages of several shards
router       has a call answered by the shard that it is for, or by all of them
batches      batches over several shards
pages        lists of several shards as one list
sums         their counts as those of one server
exposition   their metrics as one text
definitions  subscriptions of all shards: one truth
supply       the messages that a shard has for consumers that wait at others
demand       the messages that other shards have for the consumers that wait here
gathering    a pull that takes of all shards
endings      leases of several shards in one call
consuming    messages and leases of consumers, made of the four above
allotment    the limits of one webhook for all shards together, counted at its home
limits       how a shard asks for its part of them
token_rates  the rates of tokens, for all processes together
map          which shards there are and where each is asked
member       all that a process does besides being a server
"""
