"""Sources: topics whose records are published, each once. In the order to read it in:

part          registers all of this with the core
records       a source and its state, and the checks of their tables
sourcing      publishes records of a topic, each offset once
feeds         records of a topic on their way to the event loop
kafka_source  topics of Kafka as feeds
runner        publishes the records that a feed reads
rest          the calls of the API
commands      the commands of the command line
"""
