"""Programs to read and to run, against a server that runs already (`delayserver serve`). In
reading order:

order_unpaid         orders that nobody pays are closed
red_envelope_refund  red envelopes that nobody opens are refunded
fastapi_shop         a shop on FastAPI, with a signed webhook
django_shop          a shop on Django, in one file

python -m delayserver.examples.order_unpaid --server http://127.0.0.1:8080
python -m delayserver.examples.red_envelope_refund --server http://127.0.0.1:8080
python -m delayserver.examples.django_shop --help
python -m delayserver.examples.fastapi_shop --server http://127.0.0.1:8080
"""
