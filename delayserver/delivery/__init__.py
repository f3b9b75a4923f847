"""Deliveries to subscribers: from rows that fired to rows that are settled. In reading order:

dispatcher          the subscriptions of a row, and which rows are here
queues              the queues of all subscriptions
queue               the queue of one: the rows that are due for it, and who asks for them
pump                lets rows leave their queues
pushes              … to webhooks and brokers
pulls               … to consumers
handout             rows whose bodies are read together
looks               waiting rows are read to learn facts that only their bodies tell
settling            the results of deliveries
reassignment            rows of a subscription that is gone find a place
ports               the work that is needed elsewhere
backlog             its rows, and when each may leave
lane                rows in the order in which they came, in few arrays
ranks               … of a higher priority first
single_file         … of a group one at a time
deadlines           … that outlive their messages' time to live
catch_up            … that fell due while no receiver could have them, evenly over a while
parked              rows that no subscription matches
orphans             rows whose subscription was deleted
connections         the number of webhooks on their way at once, and whose turn is next
slow_start          how fast the requests of one queue may become more
permits             the limits of a webhook that several shards have in common
deliveries          the deliveries of one handout, as columns
reader              reads the bodies of rows that go out
delayed_fetch       a pull waits until enough messages are there, or its time is up
leases              messages that a consumer pulled and has not acknowledged
settler             appends finished deliveries to the dispatch log of their hour
replicated_settler  … of a shard whose logs are replicated
sink                brings deliveries to receivers of one kind
webhook             the request of a delivery, and the meaning of an answer
batch               several messages in one webhook
sender              one POST, to an address that was checked, within a deadline
addresses           to which address a connection to a broker is made
outlets             the one sink that all kinds of brokers share
outlet              a client of a broker, and the opener that makes it
sending             one call of the sink: its messages, and the result of each
open_outlets        outlets are shared, replaced and closed
shares              the part of an outlet that each subscription may have under way
turns               a few places that subscriptions share
answers             a message is stored, it is not stored, or it is unknown
carried             headers and properties that a message takes along to a broker
broker_bodies       how many bytes for brokers are in memory
complaints          a trouble that lasts is said once, then ever more rarely
own_threads         threads for calls that may hang
kafka_sink          a record for each message
transaction_sink    records, and that they are settled, in one transaction
redis_sink          an entry of a stream for each message
nats_sink           a message of JetStream for each message
amqp_sink           a message of RabbitMQ for each message
"""
