"""Detection as a project of one's own: data with boxes, torchvision's detector, mAP, a picture."""
