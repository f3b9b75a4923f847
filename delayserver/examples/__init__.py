"""Programs to read and to run, against a server that is there (`delayserver serve`).

python -m delayserver.examples.order_unpaid --server http://127.0.0.1:8080
python -m delayserver.examples.red_envelope_refund --server http://127.0.0.1:8080
python -m delayserver.examples.django_shop --help
python -m delayserver.examples.fastapi_shop --server http://127.0.0.1:8080
"""
