"""From the message log to the wheel: records are filed into the hour in which they are due, an hour
is loaded before it begins, and its rows wait in slots. In reading order:

committed   committed records on their way to their hours
filing      from records to rows: which rows, and for which file
replay      follows the message log and files its records
effects     the changes that filed records make in the catalog
expansion   from the one record of an import to its rows
days        the far level of the wheel
hours       the hours that are loaded, and when each is done
loader      reads an hour into the wheel, minus the settled rows
wheel_rows  a row of 24 bytes that says where its payload is
wheel       slots of 500 ms, millisecond order in the open slot
ended       rows of an hour that were removed or are settled
pending     waiting messages of a subject, in due order
retired     hours of which everything is settled
purge       deletes hours that are settled and past their retention
"""
